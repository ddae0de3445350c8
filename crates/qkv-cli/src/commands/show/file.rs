//! What a file becomes, by the end of its name. A new kind of file is a line in the table and an arm in [`Form::write`], where
//! the whole recording is at hand.

use super::asked::Asked;
use super::chosen::Chosen;
use super::shaded;
use crate::failure::Failure;
use qkv_explore::Recording;
use qkv_explore::draw::{Fonts, Png};
use qkv_explore::server::stand_alone;
use qkv_models::files::atomic;
use std::io::{self, Write};
use std::path::Path;
use unicode_width::UnicodeWidthChar;

/// Characters that a hint names at most.
const NAMED: usize = 8;

/// What can be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
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

/// The ends of names, what each becomes, and what that is; the first that fits is meant.
pub(crate) const FORMS: &[(&str, Form, &str)] = &[
    (".svg", Form::Svg, "a picture for print"),
    (".png", Form::Png, "a picture for screens, with the fonts of this machine"),
    (".html", Form::Html, "a page that stands alone, with every head; it opens from disk, with no network"),
    (".qkv.safetensors", Form::Recording, "the whole recording, for `qkv explore --recording`"),
    (".npy", Form::Npy, "the weights, f32, [rows, columns]"),
    (".safetensors", Form::Safetensors, "`weights`, F32, [rows, columns], with `query_tokens` and `key_tokens`"),
    (".json", Form::Json, "what `--json` tells"),
    (".csv", Form::Csv, "labels and weights"),
    (".pharaoh", Form::Pharaoh, "links between words, `0-0 1-2 …`: column and row, counted from 0"),
    (".txt", Form::Pharaoh, "the same"),
];

impl Form {
    /// The form that a name asks for.
    pub fn of(path: &Path) -> Result<Form, Failure> {
        let name = path.file_name().map(|name| name.to_string_lossy().to_lowercase()).unwrap_or_default();
        let fits = |(end, _, _): &&(&str, Form, &str)| name.len() > end.len() && name.ends_with(end);
        FORMS.iter().find(fits).map(|(_, form, _)| *form).ok_or_else(|| {
            let ends: Vec<String> = FORMS.iter().map(|(end, _, _)| format!("`{end}`")).collect();
            Failure::in_file(path, "its name does not say what to write")
                .hint(format!("names end in {}", ends.join(", ")))
        })
    }

    /// Writes what was asked for, whole or not at all.
    pub fn write(self, path: &Path, recording: &Recording, asked: &Asked) -> Result<(), Failure> {
        // These hold every layer.
        match self {
            Form::Html => return Ok(atomic::write(path, stand_alone(recording)?.as_bytes())?),
            Form::Recording => return Ok(qkv_explore::file::save(recording, path)?),
            _ => {}
        }
        if let (Form::Svg | Form::Png, Some(shaded)) = (self, shaded::printed(recording, asked)?) {
            let bytes = match self {
                Form::Svg => shaded.svg().into_bytes(),
                _ => told(shaded.png(asked.magnified, &Fonts::of_system())?),
            };
            return Ok(atomic::write(path, &bytes)?);
        }
        if let (Form::Json, Some(told)) = (self, shaded::json(recording, asked)?) {
            return Ok(atomic::write(path, told.as_bytes())?);
        }
        let chosen = Chosen::of(recording, asked)?;
        let matrix = if matches!(self, Form::Svg | Form::Png) { &chosen.matrix } else { chosen.weights()? };
        let bytes = match self {
            Form::Svg => chosen.picture(asked).svg()?.into_bytes(),
            Form::Png => told(chosen.picture(asked).png(asked.magnified, &Fonts::of_system())?),
            Form::Npy => matrix.npy()?,
            Form::Safetensors => matrix.safetensors()?,
            Form::Json => chosen.json(recording, asked)?.into_bytes(),
            Form::Csv => matrix.csv().into_bytes(),
            Form::Html | Form::Recording | Form::Pharaoh => (matrix.pharaoh() + "\n").into_bytes(),
        };
        Ok(atomic::write(path, &bytes)?)
    }
}

/// The file; what could not be written in it is told.
fn told(png: Png) -> Vec<u8> {
    if !png.missing.is_empty() {
        let _ = writeln!(io::stderr(), "{}", hint(&png.missing));
    }
    png.bytes
}

/// How characters that no font has can be had.
fn hint(missing: &[char]) -> String {
    let mut named: String = missing.iter().take(NAMED).collect();
    if missing.len() > NAMED {
        named += &format!(" and {} more", missing.len() - NAMED);
    }
    let wide = missing.iter().any(|c| c.width() == Some(2));
    let fonts = if wide { "fonts-noto-cjk" } else { "fonts-noto" };
    format!("hint: no font here has {named}; install {fonts} or write SVG")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_name_says_what_is_written() {
        assert_eq!(Form::of(Path::new("runs/a.b.SVG")).unwrap(), Form::Svg);
        assert_eq!(Form::of(Path::new("a.txt")).unwrap(), Form::Pharaoh);
        for name in ["a", ".svg", "a.gif", "svg", "runs/", ""] {
            let refused = Form::of(Path::new(name)).unwrap_err().to_string();
            assert!(refused.contains("hint: names end in `.svg`, "), "{refused}");
        }
    }

    #[test]
    fn a_hint_names_what_is_missing_and_where_to_get_it() {
        assert_eq!(hint(&['好']), "hint: no font here has 好; install fonts-noto-cjk or write SVG");
        assert_eq!(hint(&['न']), "hint: no font here has न; install fonts-noto or write SVG");
        let many: Vec<char> = ('一'..).take(11).collect();
        assert!(hint(&many).contains(" and 3 more;"));
    }
}
