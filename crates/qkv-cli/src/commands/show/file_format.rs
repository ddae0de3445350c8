//! The formats of `--out`, by extension. A new one is a line in [`FileFormat::ALL`] and an arm in
//! [`write`](super::file::write).

use crate::failure::Failure;
use std::path::Path;

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
    /// Extensions, their formats and their contents; the first match counts.
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
}
