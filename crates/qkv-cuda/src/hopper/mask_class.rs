//! Which calls Hopper's kernels take, and how: masks as a band, lengths, segments or a tile list, over scaled dot
//! products of more than a few queries.

use crate::call::Sizes;
use crate::kernel_abi::FEW_QUERIES;
use crate::memory::Dtype;
use crate::tile_list::split_lengths;
use qkv::{Attention, Mask, Place, Scale, Score};

/// Beyond any key: no limit.
const FAR: i64 = 1 << 29;

/// A mask in the terms of these kernels: each flag is a define.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MaskClass {
    /// Keys from position − left to position + right.
    pub band: bool,
    pub left: i64,
    pub right: i64,
    pub lengths: bool,
    pub segments: bool,
    pub tile_list: bool,
}

impl MaskClass {
    /// The class of a conjunction of causal, window, padding and segment masks.
    pub fn of(mask: &Mask) -> Option<MaskClass> {
        let all = MaskClass { band: false, left: FAR, right: FAR, lengths: false, segments: false, tile_list: false };
        let far = |size: usize| i64::try_from(size).unwrap_or(FAR).min(FAR);
        match mask {
            Mask::Full => Some(all),
            Mask::Causal => Some(MaskClass { band: true, right: 0, ..all }),
            Mask::Window { left, right } => Some(MaskClass { band: true, left: far(*left), right: far(*right), ..all }),
            Mask::Lengths => Some(MaskClass { lengths: true, ..all }),
            Mask::Segments => Some(MaskClass { segments: true, ..all }),
            Mask::And(a, b) => {
                let (a, b) = (MaskClass::of(a)?, MaskClass::of(b)?);
                Some(MaskClass {
                    band: a.band || b.band,
                    left: a.left.min(b.left),
                    right: a.right.min(b.right),
                    lengths: a.lengths || b.lengths,
                    segments: a.segments || b.segments,
                    tile_list: false,
                })
            }
            _ => None,
        }
    }

    /// The class of a call's mask; none where the kernels do not take the call.
    pub fn of_call(attention: &Attention, place: Place, sizes: &Sizes, dtype: Dtype) -> Option<MaskClass> {
        let listed = || {
            let (lengths, _) = split_lengths(&attention.mask)?;
            Some(MaskClass { lengths, tile_list: true, ..MaskClass::of(&Mask::Full)? })
        };
        let class = MaskClass::of(&attention.mask).or_else(listed)?;
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
        let Sizes { n, m, d, dv, .. } = *sizes;
        let sizes_fit = n > FEW_QUERIES && m > 0 && d > 0 && dv > 0 && (n.max(m) as i64) < FAR;
        let plain = !attention.entropy && attention.bias.reach().is_none();
        (dtype != Dtype::F32 && scale && placed && sizes_fit && plain).then_some(class)
    }

    /// Whether some pairs may be masked: then results may have to be recomputed.
    pub fn is_masked(&self) -> bool {
        self.band || self.lengths || self.segments || self.tile_list
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bands_and_lengths_have_a_class_and_other_masks_do_not() {
        let causal = MaskClass::of(&(Mask::causal() & Mask::window(256, 9) & Mask::lengths())).unwrap();
        assert_eq!(
            causal,
            MaskClass { band: true, left: 256, right: 0, lengths: true, segments: false, tile_list: false }
        );
        assert!(MaskClass::of(&(Mask::segments() & Mask::causal())).unwrap().segments);
        assert_eq!(MaskClass::of(&Mask::causal()).unwrap().left, FAR);
        for mask in [Mask::bits(), Mask::causal() | Mask::window(1, 1), !Mask::causal()] {
            assert_eq!(MaskClass::of(&mask), None, "{mask:?}");
        }
    }
}
