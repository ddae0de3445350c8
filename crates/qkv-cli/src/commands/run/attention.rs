//! Describes the attention of a call from options and tensors together: every typed option applies, and so does every
//! tensor that is present.

use super::args::RunArgs;
use super::tensors::InputTensors;
use crate::failure::Failure;
use qkv::{Attention, Bias, Mask};

/// Builds the description.
pub(crate) fn describe<T: qkv_simd::Element>(args: &RunArgs, tensors: &InputTensors<T>) -> Result<Attention, Failure> {
    let mut attention = Attention::new(args.score).place(args.place).bias(bias(args, tensors));
    attention = attention.mask(mask(args, tensors)?).select(args.select);
    attention = match (args.scale, &tensors.scale) {
        (Some(scale), _) => attention.scale(scale),
        (None, Some(_)) => attention.learned_scale(),
        (None, None) => attention,
    };
    if let Some(temperature) = args.temperature {
        attention = attention.temperature(temperature);
    }
    if let Some(cap) = args.softcap {
        attention = attention.softcap(cap);
    }
    if let Some(half_width) = args.local {
        attention = attention.local(half_width);
    }
    if let Some(p) = args.dropout {
        attention = attention.dropout(p);
    }
    if tensors.sinks.is_some() {
        attention = attention.with_sinks();
    }
    Ok(attention)
}

fn bias<T: qkv_simd::Element>(args: &RunArgs, tensors: &InputTensors<T>) -> Bias {
    let alibi = args.alibi.then(Bias::alibi);
    let tensor = tensors.bias.is_some().then(Bias::tensor);
    let relative = tensors.table.as_ref().map(|table| Bias::relative(table.shape[1] / 2)); // [.., 2R + 1]
    [alibi, tensor, relative].into_iter().flatten().fold(Bias::none(), |all, bias| all + bias)
}

/// The conjunction of all masks.
fn mask<T: qkv_simd::Element>(args: &RunArgs, tensors: &InputTensors<T>) -> Result<Mask, Failure> {
    let longest = tensors.q.axes()[2].max(tensors.k.axes()[2]);
    let (width, key_width) = (tensors.q.axes()[3], tensors.k.axes()[3]);
    if args.pattern.is_some_and(|pattern| pattern.hash().is_some()) && width != key_width {
        return Err(Failure::new(format!(
            "`--pattern lsh` rotates queries and keys alike, but `q` has a width of {width} and `k` of {key_width}"
        )));
    }
    let pattern = args.pattern.map(|pattern| pattern.mask(longest)).transpose()?;
    let rules = [
        args.causal.then(Mask::causal),
        args.window.map(|window| window.mask()),
        pattern,
        tensors.key_lengths.is_some().then(Mask::lengths),
        tensors.segments.is_some().then(Mask::segments),
        tensors.mask.is_some().then(Mask::bits),
    ];
    Ok(rules.into_iter().flatten().fold(Mask::full(), |all, rule| all & rule))
}
