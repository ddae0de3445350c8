//! Which calls Hopper's kernels support, and how: masks as a band, lengths, segments or a tile list, over scaled dot
//! products of more than a few queries.

use crate::call::Sizes;
use crate::kernel_abi::FEW_QUERIES;
use crate::memory::Dtype;
use qkv::engine::{Band, CompiledMask};
use qkv::{Attention, Place, Scale, Score};

/// Beyond any key: no limit.
const FAR: i64 = 1 << 29;
/// Sequences up to this length are left to the general kernels.
const SHORT: usize = 32;

/// A mask in terms of these kernels: each flag is a define.
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
    /// The class of a conjunction of causal, window, padding and segment masks, or of a mask that depends only on
    /// positions, possibly with padding.
    fn of(mask: &CompiledMask) -> Option<MaskClass> {
        let all = MaskClass { band: false, left: FAR, right: FAR, lengths: false, segments: false, tile_list: false };
        match mask.band() {
            Some(Band { limited, left, right, lengths, segments, .. }) => Some(MaskClass {
                band: limited,
                left: left.min(FAR),
                right: right.min(FAR),
                lengths,
                segments,
                tile_list: false,
            }),
            None => mask.without_lengths().map(|(lengths, _)| MaskClass { lengths, tile_list: true, ..all }),
        }
    }

    /// The class of a call's mask; `None` if the kernels do not support the call.
    pub fn of_call(
        mask: &CompiledMask,
        attention: &Attention,
        place: Place,
        sizes: &Sizes,
        dtype: Dtype,
    ) -> Option<MaskClass> {
        let class = MaskClass::of(mask)?;
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
        // For short sequences, tiles of their size are faster than a few full ones.
        let short = n.max(m) <= SHORT;
        let sizes_fit = n > FEW_QUERIES && !short && m > 0 && d > 0 && dv > 0 && (n.max(m) as i64) < FAR;
        let plain = !attention.entropy && attention.bias.reach().is_none();
        (dtype != Dtype::F32 && scale && placed && sizes_fit && plain).then_some(class)
    }

    /// Whether any pair may be masked: then results may have to be recomputed.
    pub fn is_masked(&self) -> bool {
        self.band || self.lengths || self.segments || self.tile_list
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use qkv::Mask;

    fn class(mask: &Mask) -> Option<MaskClass> {
        MaskClass::of(&CompiledMask::new(mask, 100, 100, Place::Start))
    }

    #[test]
    fn bands_lengths_and_segments_have_a_class_of_their_own() {
        let causal = class(&(Mask::causal() & Mask::window(256, 9) & Mask::lengths())).unwrap();
        let expected = MaskClass { band: true, left: 256, right: 0, lengths: true, segments: false, tile_list: false };
        assert_eq!(causal, expected);
        assert!(class(&(Mask::segments() & Mask::causal())).unwrap().segments);
        assert_eq!(class(&Mask::causal()).unwrap().left, FAR);
        assert!(!class(&Mask::full()).unwrap().is_masked());
    }

    #[test]
    fn masks_of_positions_alone_are_lists_and_others_have_no_class() {
        for mask in [Mask::strided(8), Mask::causal() | Mask::window(1, 1), !Mask::causal()] {
            let listed = class(&mask).unwrap();
            assert!(listed.tile_list && !listed.lengths, "{mask:?}");
        }
        let padded = class(&(Mask::longformer(64, [0]) & (Mask::lengths() & Mask::causal()))).unwrap();
        assert!(padded.tile_list && padded.lengths);
        for mask in [Mask::bits(), Mask::segments() & Mask::strided(8), Mask::lengths() | Mask::causal()] {
            assert_eq!(class(&mask), None, "{mask:?}");
        }
    }
}
