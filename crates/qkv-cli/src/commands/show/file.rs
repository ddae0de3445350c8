//! Writes a recording, or the selected part of it, to a file of any [`FileFormat`].

use super::args::ShowArgs;
use super::file_format::FileFormat;
use super::selected::SelectedAttention;
use super::shading;
use crate::atomic_file::OutputPath;
use crate::failure::Failure;
use crate::output::note;
use qkv_explore::Recording;
use qkv_explore::draw::{Fonts, Png};
use qkv_explore::server::standalone_page;
use std::path::Path;
use unicode_width::UnicodeWidthChar;

/// The most characters that a hint names.
const NAMED: usize = 8;

/// Writes the file, complete or not at all.
pub fn write(format: FileFormat, path: &Path, recording: &Recording, args: &ShowArgs) -> Result<(), Failure> {
    let output = OutputPath::new(path, None)?;
    // These formats hold every layer.
    match format {
        FileFormat::Html => return output.write(standalone_page(recording)?.as_bytes()),
        FileFormat::Recording => return Ok(qkv_explore::file::save(recording, path)?),
        _ => {}
    }
    if let (FileFormat::Svg | FileFormat::Png, Some(shaded)) = (format, shading::picture(recording, args)?) {
        let bytes = match format {
            FileFormat::Svg => shaded.svg().into_bytes(),
            _ => png_bytes(shaded.png(args.magnification, &Fonts::of_system())?),
        };
        return output.write(&bytes);
    }
    if let (FileFormat::Json, Some(json)) = (format, shading::to_json(recording, args)?) {
        return output.write(json.as_bytes());
    }
    let selected = SelectedAttention::of(recording, args)?;
    let matrix =
        if matches!(format, FileFormat::Svg | FileFormat::Png) { &selected.matrix } else { selected.weights()? };
    let bytes = match format {
        FileFormat::Svg => selected.picture(args).svg()?.into_bytes(),
        FileFormat::Png => png_bytes(selected.picture(args).png(args.magnification, &Fonts::of_system())?),
        FileFormat::Npy => matrix.npy()?,
        FileFormat::Safetensors => matrix.safetensors()?,
        FileFormat::Json => selected.to_json(recording, args)?.into_bytes(),
        FileFormat::Csv => matrix.csv().into_bytes(),
        FileFormat::Html | FileFormat::Recording | FileFormat::Pharaoh => (matrix.pharaoh() + "\n").into_bytes(),
    };
    output.write(&bytes)
}

/// The bytes of a PNG; characters missing from every font give a hint on stderr.
fn png_bytes(png: Png) -> Vec<u8> {
    if !png.missing.is_empty() {
        note(hint(&png.missing));
    }
    png.bytes
}

fn hint(missing: &[char]) -> String {
    let mut named: String = missing.iter().take(NAMED).collect();
    if missing.len() > NAMED {
        named += &format!(" and {} more", missing.len() - NAMED);
    }
    let wide = missing.iter().any(|c| c.width() == Some(2));
    let fonts = if wide { "fonts-noto-cjk" } else { "fonts-noto" };
    format!("hint: no installed font has {named}; install {fonts} or write SVG")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hint_names_missing_characters_and_a_package_that_has_them() {
        assert_eq!(hint(&['好']), "hint: no installed font has 好; install fonts-noto-cjk or write SVG");
        assert_eq!(hint(&['न']), "hint: no installed font has न; install fonts-noto or write SVG");
        let many: Vec<char> = ('一'..).take(11).collect();
        assert!(hint(&many).contains(" and 3 more;"));
    }
}
