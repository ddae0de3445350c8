//! What Hopper's kernels take: masks that are a band, lengths, segments, or a list of tiles, and descriptions that are dot
//! products of more than a few queries.

use crate::memory::Dtype;
use crate::plan::Sizes;
use crate::tiles::without_data;
use qkv::{Attention, Mask, Place, Scale, Score};

/// Without limit: further than any key.
const FAR: i64 = 1 << 29;
/// Up to so many queries the keys are shared out in pieces, which these kernels do not do.
const FEW_QUERIES: usize = 16;

/// The keys a query may see, as far as these kernels know masks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    pub band: bool,
    pub left: i64,
    pub right: i64,
    pub lengths: bool,
    pub segments: bool,
    /// By a list of tiles.
    pub listed: bool,
}

impl Seen {
    /// Of a mask, if it is causal, a window, padding, segments, or several of these at once.
    pub fn of(mask: &Mask) -> Option<Seen> {
        let all = Seen { band: false, left: FAR, right: FAR, lengths: false, segments: false, listed: false };
        let far = |size: usize| i64::try_from(size).unwrap_or(FAR).min(FAR);
        match mask {
            Mask::Full => Some(all),
            Mask::Causal => Some(Seen { band: true, right: 0, ..all }),
            Mask::Window { left, right } => Some(Seen { band: true, left: far(*left), right: far(*right), ..all }),
            Mask::Lengths => Some(Seen { lengths: true, ..all }),
            Mask::Segments => Some(Seen { segments: true, ..all }),
            Mask::And(a, b) => {
                let (a, b) = (Seen::of(a)?, Seen::of(b)?);
                Some(Seen {
                    band: a.band || b.band,
                    left: a.left.min(b.left),
                    right: a.right.min(b.right),
                    lengths: a.lengths || b.lengths,
                    segments: a.segments || b.segments,
                    listed: false,
                })
            }
            _ => None,
        }
    }
}

/// Whether the forward kernel takes a description of these sizes.
pub(super) fn fits(attention: &Attention, place: Place, sizes: &Sizes, dtype: Dtype) -> Option<Seen> {
    let listed = || {
        let (lengths, _) = without_data(&attention.mask)?;
        Some(Seen { lengths, listed: true, ..Seen::of(&Mask::Full)? })
    };
    let seen = Seen::of(&attention.mask).or_else(listed)?;
    let scale = match attention.scale {
        Scale::Own => attention.score == Score::ScaledDot || attention.score == Score::Dot,
        Scale::Fixed(scale) => scale > 0.0,
        Scale::Learned => false,
    };
    let placed = match place {
        Place::Start | Place::End => true,
        Place::Offset(offset) => offset.abs() < FAR,
        Place::Given => false,
    };
    let sizes_fit =
        sizes.n > FEW_QUERIES && sizes.m > 0 && sizes.d > 0 && sizes.dv > 0 && (sizes.n.max(sizes.m) as i64) < FAR;
    let plain = !attention.entropy && attention.bias.reach().is_none();
    (dtype != Dtype::F32 && scale && placed && sizes_fit && plain).then_some(seen)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_that_are_bands_and_lengths_fit_and_others_do_not() {
        let causal = Seen::of(&(Mask::causal() & Mask::window(256, 9) & Mask::lengths())).unwrap();
        assert_eq!(causal, Seen { band: true, left: 256, right: 0, lengths: true, segments: false, listed: false });
        assert!(Seen::of(&(Mask::segments() & Mask::causal())).unwrap().segments);
        assert_eq!(Seen::of(&Mask::causal()).unwrap().left, FAR);
        for mask in [Mask::bits(), Mask::causal() | Mask::window(1, 1), !Mask::causal()] {
            assert_eq!(Seen::of(&mask), None, "{mask:?}");
        }
    }
}
