//! Generated pictures: one to three colored shapes on a plain background, with a caption, boxes, and questions that the
//! picture answers. Everything is a function of the seed.

use super::{DEV, TRAIN};
use crate::draws::Draws;
use crate::image::Image;
use serde::{Deserialize, Serialize};

/// Separates scenes from other draws of a seed.
const SCENES: u32 = 1 << 8;
/// Side length of a picture in pixels.
pub const SIDE: usize = 64;
/// The smallest and the largest diameter of a shape.
const SMALLEST: usize = 12;
const LARGEST: usize = 24;
/// Positions tried for a shape before it is left out.
const TRIES: usize = 40;

/// Kinds of shapes.
pub const KINDS: [&str; 3] = ["circle", "square", "triangle"];
const COLORS: [(&str, [u8; 3]); 6] = [
    ("red", [220, 40, 40]),
    ("green", [40, 170, 60]),
    ("blue", [50, 70, 220]),
    ("yellow", [235, 210, 40]),
    ("black", [25, 25, 25]),
    ("brown", [140, 85, 35]),
];
const COUNTS: [&str; 4] = ["none", "one", "two", "three"];

/// What is learned from the pictures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ShapesTask {
    /// To describe them: `a red circle left of a blue square`.
    Captions,
    /// To answer questions about them: `what color is the circle`.
    Questions,
    /// To find the shapes: a box around each.
    Boxes,
}

/// A shape of a scene.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Its kind, an index of [`KINDS`].
    pub kind: usize,
    /// Its color.
    pub color: &'static str,
    /// Left, top, right and bottom in pixels; right and bottom are exclusive.
    pub edges: [usize; 4],
}

/// A picture and its shapes, from left to right.
#[derive(Clone, Debug)]
pub struct Scene {
    /// The picture.
    pub image: Image,
    /// Its shapes.
    pub shapes: Vec<Shape>,
}

impl Shape {
    /// Whether a pixel belongs to it.
    fn covers(&self, x: usize, y: usize) -> bool {
        let [left, top, right, bottom] = self.edges;
        if x < left || x >= right || y < top || y >= bottom {
            return false;
        }
        let side = (right - left) as f64;
        let (across, down) = ((x - left) as f64 + 0.5, (y - top) as f64 + 0.5);
        match self.kind {
            0 => (across - side / 2.0).powi(2) + (down - side / 2.0).powi(2) <= (side / 2.0).powi(2),
            1 => true,
            _ => (across - side / 2.0).abs() <= down / 2.0,
        }
    }

    fn name(&self) -> String {
        format!("{} {}", self.color, KINDS[self.kind])
    }
}

impl Scene {
    /// The scene number `at` of a seed.
    fn drawn(seed: u64, purpose: u32, at: usize) -> Scene {
        let mut draws = Draws::new(seed, [SCENES | purpose, at as u32, 0]);
        let light = 200 + draws.below(56) as u8;
        let mut shapes: Vec<Shape> = Vec::new();
        for _ in 0..1 + draws.below(3) {
            for _ in 0..TRIES {
                let side = SMALLEST + draws.below(LARGEST - SMALLEST + 1);
                let (left, top) = (draws.below(SIDE - side), draws.below(SIDE - side));
                let edges = [left, top, left + side, top + side];
                let apart = |other: &Shape| {
                    let [l, t, r, b] = other.edges;
                    edges[0] >= r || l >= edges[2] || edges[1] >= b || t >= edges[3]
                };
                let kind = draws.below(KINDS.len());
                let color = COLORS[draws.below(COLORS.len())].0;
                // Each kind and each color at most once, so that questions have one answer.
                let other = |shape: &Shape| shape.kind != kind && shape.color != color && shape.edges[0] != left;
                if shapes.iter().all(|shape| apart(shape) && other(shape)) {
                    shapes.push(Shape { kind, color, edges });
                    break;
                }
            }
        }
        shapes.sort_by_key(|shape| shape.edges[0]);
        let mut points = vec![light; SIDE * SIDE * 3];
        for (at, pixel) in points.chunks_exact_mut(3).enumerate() {
            if let Some(shape) = shapes.iter().find(|shape| shape.covers(at % SIDE, at / SIDE)) {
                let color = COLORS.iter().find(|(name, _)| *name == shape.color).map_or([0; 3], |(_, rgb)| *rgb);
                pixel.copy_from_slice(&color);
            }
        }
        Scene { image: Image::new(SIDE, SIDE, 3, points).expect("of its size"), shapes }
    }

    /// Its description: `a red circle left of a blue square`.
    pub fn caption(&self) -> String {
        self.shapes.iter().map(|shape| format!("a {}", shape.name())).collect::<Vec<_>>().join(" left of ")
    }

    /// Question number `at` about it, and the answer.
    pub fn question(&self, at: usize) -> (String, String) {
        let shape = &self.shapes[at / 5 % self.shapes.len()];
        let yes = |truth: bool| if truth { "yes" } else { "no" }.to_owned();
        match at % 5 {
            0 => (format!("what color is the {}", KINDS[shape.kind]), shape.color.to_owned()),
            1 => (format!("what shape is {}", shape.color), KINDS[shape.kind].to_owned()),
            2 => ("how many shapes are there".into(), COUNTS[self.shapes.len()].to_owned()),
            3 => {
                let color = COLORS[at / 15 % COLORS.len()].0;
                (format!("is there something {color}"), yes(self.shapes.iter().any(|shape| shape.color == color)))
            }
            _ => {
                let kind = at / 15 % KINDS.len();
                (format!("is there a {}", KINDS[kind]), yes(self.shapes.iter().any(|shape| shape.kind == kind)))
            }
        }
    }
}

/// Scenes for training and for validation.
///
/// ```
/// let (train, dev) = qkv_models::tasks::scenes(7, 3, 2);
/// assert_eq!((train.len(), dev.len()), (3, 2));
/// assert!(train[0].caption().starts_with("a "));
/// ```
pub fn scenes(seed: u64, train: usize, dev: usize) -> (Vec<Scene>, Vec<Scene>) {
    let some = |purpose: u32, count: usize| (0..count).map(|at| Scene::drawn(seed, purpose, at)).collect();
    (some(TRAIN, train), some(DEV, dev))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_box_is_around_its_shape_and_questions_have_their_answers() {
        let (scenes, _) = scenes(3, 60, 0);
        assert!((1..=3).all(|count| scenes.iter().any(|scene| scene.shapes.len() == count)));
        for scene in &scenes {
            for shape in &scene.shapes {
                let [left, top, right, bottom] = shape.edges;
                let color = COLORS.iter().find(|(name, _)| *name == shape.color).unwrap().1;
                let inside = (top..bottom).flat_map(|y| (left..right).map(move |x| (x, y)));
                let same = inside.filter(|(x, y)| scene.image.points()[(y * SIDE + x) * 3..][..3] == color).count();
                let all = scene.image.points().chunks_exact(3).filter(|pixel| *pixel == color).count();
                assert_eq!(same, all);
                assert!(same * 5 > 2 * (right - left) * (bottom - top), "{shape:?}");
            }
            let (question, answer) = scene.question(0);
            let kind = question.rsplit(' ').next().unwrap();
            assert!(scene.caption().contains(&format!("{answer} {kind}")));
        }
        assert_eq!(scenes[5].image, super::scenes(3, 6, 0).0[5].image);
    }
}
