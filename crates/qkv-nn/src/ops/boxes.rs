//! The loss of boxes: L1 distance of their coordinates plus generalized intersection over union (Rezatofighi et al.
//! 2019, arXiv:1902.09630), as in DETR (Carion et al. 2020, arXiv:2005.12872).

use crate::float::Float;
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;

/// Lower bound of the areas used as divisors.
const LEAST: f64 = 1e-9;

/// The generalized intersection over union of two boxes, each given as left, top, right and bottom, between −1 and 1,
/// and its gradient with respect to the first box.
pub fn generalized_iou(a: [f64; 4], b: [f64; 4]) -> (f64, [f64; 4]) {
    let (wide, high) = (a[2] - a[0], a[3] - a[1]);
    let (across, down) = (a[2].min(b[2]) - a[0].max(b[0]), a[3].min(b[3]) - a[1].max(b[1]));
    let meets = across > 0.0 && down > 0.0;
    let inter = if meets { across * down } else { 0.0 };
    let union = (wide * high + (b[2] - b[0]) * (b[3] - b[1]) - inter).max(LEAST);
    let (hull_wide, hull_high) = (a[2].max(b[2]) - a[0].min(b[0]), a[3].max(b[3]) - a[1].min(b[1]));
    let hull = (hull_wide * hull_high).max(LEAST);
    let value = inter / union - 1.0 + union / hull;
    // Derivatives of area, intersection and hull with respect to each edge.
    let sign = [-1.0, -1.0, 1.0, 1.0];
    let gradient = std::array::from_fn(|edge| {
        let (side, cut, whole) = match edge % 2 {
            0 => (high, down, hull_high),
            _ => (wide, across, hull_wide),
        };
        // An edge of the first box bounds the intersection if it lies inside the second box.
        let inside = if edge < 2 { a[edge] > b[edge] } else { a[edge] < b[edge] };
        let d_inter = if meets && inside { sign[edge] * cut } else { 0.0 };
        let d_union = sign[edge] * side - d_inter;
        let d_hull = if inside { 0.0 } else { sign[edge] * whole };
        (d_inter * union - inter * d_union) / (union * union) + (d_union * hull - union * d_hull) / (hull * hull)
    });
    (value, gradient)
}

/// Converts a box of center, width and height to left, top, right and bottom.
pub fn edges([x, y, wide, high]: [f64; 4]) -> [f64; 4] {
    [x - wide / 2.0, y - high / 2.0, x + wide / 2.0, y + high / 2.0]
}

/// Target boxes of rows, and the weight of each part of the loss.
#[derive(Clone, Copy, Debug)]
pub struct BoxTarget<'a> {
    /// Rows and the target box of each: center, width and height, as fractions of the image.
    pub boxes: &'a [(usize, [f64; 4])],
    /// Factor of the L1 distance of the coordinates.
    pub distance: f64,
    /// Factor of one minus the generalized intersection over union.
    pub overlap: f64,
    /// Factor of each row's gradient.
    pub scale: f64,
}

impl<T: Float> Tape<'_, T> {
    /// The loss of the logits `x [.., 4]` of boxes, whose sigmoids are center, width and height, summed over the rows
    /// that have a target. On a training tape the backward pass starts here.
    ///
    /// # Panics
    /// If the shapes do not match, or a target's row does not exist.
    pub fn box_loss(&mut self, x: &Var<T>, target: BoxTarget<'_>) -> f64 {
        assert_eq!(x.value.width(), 4, "a box has four numbers");
        let mut gradient = Tensor::zeros(self.pool, x.shape());
        let mut loss = 0.0;
        for &(row, expected) in target.boxes {
            let logits = &x.value.data()[4 * row..][..4];
            let found: [f64; 4] = std::array::from_fn(|at| 1.0 / (1.0 + (-logits[at].to_f64()).exp()));
            let (overlap, d_overlap) = generalized_iou(edges(found), edges(expected));
            loss += target.overlap * (1.0 - overlap);
            let d = &mut gradient.data_mut()[4 * row..][..4];
            for at in 0..4 {
                let apart = found[at] - expected[at];
                loss += target.distance * apart.abs();
                let (first, second) = (d_overlap[at % 2], d_overlap[at % 2 + 2]);
                let d_found = if at < 2 { first + second } else { (second - first) / 2.0 };
                let sign = if apart == 0.0 { 0.0 } else { apart.signum() };
                let slope = target.distance * sign - target.overlap * d_found;
                d[at] += T::of_f64(target.scale * slope * found[at] * (1.0 - found[at]));
            }
        }
        if self.is_training() {
            self.seed(x, gradient);
        }
        loss
    }
}
