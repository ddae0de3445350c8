//! The formats of `--out`, by extension. A new one is a line in [`FileFormat::ALL`] and an arm in
//! [`FileFormat::write`].

use super::args::ShowArgs;
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

/// A file format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileFormat {
    Svg,
    Png,
    Html,
    Recording,
    Npy,
    Safetensors,
    Json,
    Csv,
    Pharaoh,
}

impl FileFormat {
    /// Extensions, their formats and what is in them; the first that fits counts.
    pub const ALL: &[(&str, FileFormat, &str)] = &[
        (".svg", FileFormat::Svg, "a picture for print"),
        (".png", FileFormat::Png, "a picture for screens, in the fonts of this machine"),
        (".html", FileFormat::Html, "a self-contained page with every head; opens from disk, offline"),
        (".qkv.safetensors", FileFormat::Recording, "the whole recording, for `qkv explore --recording`"),
        (".npy", FileFormat::Npy, "the weights, f32, [rows, columns]"),
        (
            ".safetensors",
            FileFormat::Safetensors,
            "`weights`, F32, [rows, columns], with `query_tokens` and `key_tokens`",
        ),
        (".json", FileFormat::Json, "the object of `--json`"),
        (".csv", FileFormat::Csv, "labels and weights"),
        (".pharaoh", FileFormat::Pharaoh, "word links `0-0 1-2 …`: column and row, from 0"),
        (".txt", FileFormat::Pharaoh, "the same"),
    ];

    /// The format of a file name.
    pub fn of(path: &Path) -> Result<FileFormat, Failure> {
        let name = path.file_name().map(|name| name.to_string_lossy().to_lowercase()).unwrap_or_default();
        let fits = |(end, _, _): &&(&str, FileFormat, &str)| name.len() > end.len() && name.ends_with(end);
        FileFormat::ALL.iter().find(fits).map(|(_, form, _)| *form).ok_or_else(|| {
            let ends: Vec<String> = FileFormat::ALL.iter().map(|(end, _, _)| format!("`{end}`")).collect();
            Failure::in_file(path, "unknown extension").hint(format!("known extensions are {}", ends.join(", ")))
        })
    }

    /// Writes the file, complete or not at all.
    pub fn write(self, path: &Path, recording: &Recording, args: &ShowArgs) -> Result<(), Failure> {
        let output = OutputPath::new(path, None)?;
        // These hold every layer.
        match self {
            FileFormat::Html => return output.write(standalone_page(recording)?.as_bytes()),
            FileFormat::Recording => return Ok(qkv_explore::file::save(recording, path)?),
            _ => {}
        }
        if let (FileFormat::Svg | FileFormat::Png, Some(shaded)) = (self, shading::picture(recording, args)?) {
            let bytes = match self {
                FileFormat::Svg => shaded.svg().into_bytes(),
                _ => png_bytes(shaded.png(args.magnification, &Fonts::of_system())?),
            };
            return output.write(&bytes);
        }
        if let (FileFormat::Json, Some(json)) = (self, shading::to_json(recording, args)?) {
            return output.write(json.as_bytes());
        }
        let selected = SelectedAttention::of(recording, args)?;
        let matrix =
            if matches!(self, FileFormat::Svg | FileFormat::Png) { &selected.matrix } else { selected.weights()? };
        let bytes = match self {
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
}

/// The bytes of a PNG; characters that no font has are a hint on stderr.
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
    fn the_extension_is_the_format() {
        assert_eq!(FileFormat::of(Path::new("runs/a.b.SVG")).unwrap(), FileFormat::Svg);
        assert_eq!(FileFormat::of(Path::new("a.txt")).unwrap(), FileFormat::Pharaoh);
        for name in ["a", ".svg", "a.gif", "svg", "runs/", ""] {
            let refused = FileFormat::of(Path::new(name)).unwrap_err().to_string();
            assert!(refused.contains("hint: known extensions are `.svg`, "), "{refused}");
        }
    }

    #[test]
    fn a_hint_names_missing_characters_and_a_package_that_has_them() {
        assert_eq!(hint(&['好']), "hint: no installed font has 好; install fonts-noto-cjk or write SVG");
        assert_eq!(hint(&['न']), "hint: no installed font has न; install fonts-noto or write SVG");
        let many: Vec<char> = ('一'..).take(11).collect();
        assert!(hint(&many).contains(" and 3 more;"));
    }
}
