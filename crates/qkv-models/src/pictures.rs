//! Images with their annotations, from lists: `image ⇥ text` for captions, `image ⇥ question ⇥ answer` for questions.
//! Paths are relative to the folder of the list. Each image is read once and resized as it is read, so that photographs
//! of any size are held at the model's size.

use crate::files::packed;
use crate::image::Image;
use crate::tasks::Scene;
use crate::{Error, Result};
use rayon::prelude::*;
use std::collections::HashMap;
use std::path::Path;

/// The largest number of lines in a list.
const MOST_LINES: usize = 1 << 24;

/// Images, and lines about them: the index of an image and the other columns of the line.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pictures<const N: usize> {
    pub images: Vec<Image>,
    pub lines: Vec<(usize, [String; N])>,
}

impl<const N: usize> Pictures<N> {
    /// Reads a list; `fit` resizes each image.
    pub fn read(path: &Path, fit: impl Fn(&Image) -> Result<Image> + Sync) -> Result<Pictures<N>> {
        let text = packed::text(path)?;
        let folder = path.parent().unwrap_or(Path::new(""));
        let (mut found, mut places, mut names) = (Pictures::default(), HashMap::new(), Vec::new());
        for (at, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let wrong = |what: String| Error::line(path, at + 1, what);
            if at >= MOST_LINES {
                return Err(wrong(format!("the list has more than {MOST_LINES} lines")));
            }
            // The last column is the rest of the line.
            let columns: Vec<&str> = line.splitn(N + 1, '\t').map(str::trim).collect();
            let [name, rest @ ..] = &columns[..] else { unreachable!("a line has a column") };
            if let Some(empty) = columns.iter().position(|column| column.is_empty()).filter(|_| rest.len() == N) {
                return Err(wrong(format!("column {} is empty", empty + 1)));
            }
            if rest.len() != N {
                return Err(wrong(format!("the line has {} columns, expected {}", columns.len(), N + 1))
                    .with_hint("each line is an image, a tab, and what is said about it"));
            }
            let image = match places.get(*name) {
                Some(&image) => image,
                None => {
                    names.push((at + 1, *name));
                    places.insert(*name, names.len() - 1);
                    names.len() - 1
                }
            };
            let mut rest = rest.iter().map(|column| column.replace('\t', " "));
            found.lines.push((image, std::array::from_fn(|_| rest.next().unwrap_or_default())));
        }
        let read = |&(line, name): &(usize, &str)| {
            let image = Image::open(folder.join(name)).map_err(|e| Error::line(path, line, e.to_string()))?;
            fit(&image)
        };
        found.images = names.par_iter().map(read).collect::<Vec<_>>().into_iter().collect::<Result<_>>()?;
        if found.lines.is_empty() {
            return Err(Error::line(path, 1, "the list is empty"));
        }
        Ok(found)
    }

    /// Scenes, with the lines that `say` returns for each.
    pub fn of_scenes(
        scenes: &[Scene],
        fit: impl Fn(&Image) -> Result<Image>,
        say: impl Fn(usize, &Scene) -> Vec<[String; N]>,
    ) -> Result<Pictures<N>> {
        let images = scenes.iter().map(|scene| fit(&scene.image)).collect::<Result<_>>()?;
        let lines = scenes.iter().enumerate();
        let lines = lines.flat_map(|(at, scene)| say(at, scene).into_iter().map(move |line| (at, line))).collect();
        Ok(Pictures { images, lines })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_read_once_and_lines_that_are_wrong_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let bmp = |name: &str| {
            let header = [70u32, 0, 54, 40, 2, 2, 24 << 16 | 1, 0, 16, 0, 0, 0, 0];
            let bytes =
                [&b"BM"[..], &header.map(u32::to_le_bytes).concat(), &[1, 2, 3, 1, 2, 3, 0, 0].repeat(2)].concat();
            std::fs::write(folder.path().join(name), bytes).unwrap();
        };
        bmp("a.bmp");
        bmp("b.bmp");
        let path = folder.path().join("list.tsv");
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            Pictures::<1>::read(&path, |image| Ok(image.clone()))
        };
        let found = read("a.bmp\tone\nb.bmp\ttwo\tthree\n\na.bmp\tfour\n").unwrap();
        assert_eq!((found.images.len(), found.images[0].points()), (2, &[3, 2, 1].repeat(4)[..]));
        assert_eq!(found.lines[1], (1, ["two three".to_owned()]));
        assert_eq!(found.lines[2].0, 0);
        let said = |text: &str| read(text).unwrap_err().to_string();
        assert!(said("a.bmp\tx\na.bmp\t \n").contains(":2: column 2 is empty"));
        assert!(said("a.bmp\n").contains(":1: the line has 1 columns, expected 2"));
        assert!(said("a.bmp\tx\nc.bmp\ty\n").contains(":2: cannot open"));
        assert!(said("\n").contains("the list is empty"));
    }
}
