//! Images with boxes in COCO's JSON: `images`, `annotations` and `categories`. Paths are relative to the folder of the
//! file. Boxes of crowds are left out.

use crate::files::folder::parse_json;
use crate::files::packed;
use crate::{Error, Result};
use serde::Deserialize;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// An image with its objects.
#[derive(Clone, Debug, PartialEq)]
pub struct BoxedImage {
    /// The file.
    pub path: PathBuf,
    /// Classes and boxes: left, top, right and bottom as fractions of the image.
    pub boxes: Vec<(usize, [f64; 4])>,
}

#[derive(Deserialize)]
struct Coco {
    images: Vec<CocoImage>,
    annotations: Vec<Annotation>,
    categories: Vec<Category>,
}

#[derive(Deserialize)]
struct CocoImage {
    id: u64,
    file_name: String,
    width: f64,
    height: f64,
}

#[derive(Deserialize)]
struct Annotation {
    image_id: u64,
    category_id: u64,
    bbox: [f64; 4],
    #[serde(default)]
    iscrowd: u8,
}

#[derive(Deserialize)]
struct Category {
    id: u64,
    name: String,
}

/// Reads a file: the images, and the names of the classes in the order of their ids.
///
/// # Errors
/// Names the file, and the image or box that is wrong.
pub fn boxes(path: &Path) -> Result<(Vec<BoxedImage>, Vec<String>)> {
    let Coco { images, annotations, mut categories } = parse_json(&packed::bytes(path, packed::LARGEST)?, path)?;
    let wrong = |part: String, what: String| Error::format(path, part, what);
    categories.sort_by_key(|category| category.id);
    let classes: HashMap<u64, usize> = categories.iter().enumerate().map(|(at, one)| (one.id, at)).collect();
    if categories.is_empty() || classes.len() != categories.len() {
        return Err(wrong("field `categories`".into(), "there are none, or two have one id".into()));
    }
    let folder = path.parent().unwrap_or(Path::new(""));
    let (mut found, mut places, mut sizes) = (Vec::with_capacity(images.len()), HashMap::new(), Vec::new());
    for CocoImage { id, file_name, width, height } in images {
        if !(width >= 1.0 && height >= 1.0 && width <= 1e6 && height <= 1e6) {
            return Err(wrong(format!("image {id}"), format!("it is {width} × {height}")));
        }
        if places.insert(id, found.len()).is_some() {
            return Err(wrong(format!("image {id}"), "it is there twice".into()));
        }
        found.push(BoxedImage { path: folder.join(file_name), boxes: Vec::new() });
        sizes.push([width, height]);
    }
    if found.is_empty() {
        return Err(wrong("field `images`".into(), "there are none".into()));
    }
    for (at, Annotation { image_id, category_id, bbox, iscrowd }) in annotations.into_iter().enumerate() {
        let part = || format!("annotation {}", at + 1);
        let Some(&place) = places.get(&image_id) else {
            return Err(wrong(part(), format!("there is no image {image_id}")));
        };
        let Some(&class) = classes.get(&category_id) else {
            return Err(wrong(part(), format!("there is no category {category_id}")));
        };
        let [left, top, width, height] = bbox;
        if !bbox.iter().all(|x| x.is_finite()) || width < 0.0 || height < 0.0 {
            return Err(wrong(part(), format!("its box is {bbox:?}")));
        }
        if iscrowd == 0 {
            let [wide, high] = sizes[place];
            found[place].boxes.push((class, [left / wide, top / high, (left + width) / wide, (top + height) / high]));
        }
    }
    Ok((found, categories.into_iter().map(|category| category.name).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boxes_become_fractions_and_references_that_lead_nowhere_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        let read = |annotations: &str| {
            let text = format!(
                r#"{{"images":[{{"id":7,"file_name":"x/a.jpg","width":200,"height":100}}],
                    "annotations":[{annotations}],
                    "categories":[{{"id":5,"name":"b"}},{{"id":2,"name":"a"}}]}}"#
            );
            std::fs::write(&path, text).unwrap();
            boxes(&path)
        };
        let (found, names) = read(
            r#"{"image_id":7,"category_id":5,"bbox":[20,10,40,50]},{"image_id":7,"category_id":2,"bbox":[0,0,9,9],"iscrowd":1}"#,
        )
        .unwrap();
        assert_eq!((names, &found[0].boxes[..]), (vec!["a".into(), "b".into()], &[(1, [0.1, 0.1, 0.3, 0.6])][..]));
        assert_eq!(found[0].path, folder.path().join("x/a.jpg"));
        let said = |annotation: &str| read(annotation).unwrap_err().to_string();
        assert!(said(r#"{"image_id":8,"category_id":5,"bbox":[0,0,1,1]}"#).contains("there is no image 8"));
        assert!(said(r#"{"image_id":7,"category_id":1,"bbox":[0,0,1,1]}"#).contains("there is no category 1"));
        assert!(said(r#"{"image_id":7,"category_id":5,"bbox":[0,0,-1,1]}"#).contains("its box is"));
        assert!(said(r#"{"image_id":7,"category_id":5,"bbox":[0,0,1]}"#).contains("a.json"));
    }
}
