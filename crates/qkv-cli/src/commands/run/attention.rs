//! The attention that choices and tensors ask for together: a choice that was typed switches itself on, and so does a
//! tensor that is there.

use crate::arguments::Choices;
use crate::failure::Failure;
use crate::given::Given;
use qkv::{Attention, Bias, Mask};

/// Describes the attention of a call.
pub(crate) fn describe<T: qkv_simd::Element>(choices: &Choices, given: &Given<T>) -> Result<Attention, Failure> {
    let mut attention = Attention::new(choices.score).place(choices.place).bias(bias(choices, given));
    attention = attention.mask(mask(choices, given)?).select(choices.select);
    attention = match (choices.scale, &given.scale) {
        (Some(scale), _) => attention.scale(scale),
        (None, Some(_)) => attention.learned_scale(),
        (None, None) => attention,
    };
    if let Some(temperature) = choices.temperature {
        attention = attention.temperature(temperature);
    }
    if let Some(cap) = choices.softcap {
        attention = attention.softcap(cap);
    }
    if let Some(half_width) = choices.local {
        attention = attention.local(half_width);
    }
    if let Some(p) = choices.dropout {
        attention = attention.dropout(p);
    }
    if given.sinks.is_some() {
        attention = attention.with_sinks();
    }
    Ok(attention)
}

fn bias<T: qkv_simd::Element>(choices: &Choices, given: &Given<T>) -> Bias {
    let alibi = choices.alibi.then(Bias::alibi);
    let tensor = given.bias.is_some().then(Bias::tensor);
    let relative = given.table.as_ref().map(|table| Bias::relative(table.shape[1] / 2)); // [.., 2R + 1]
    [alibi, tensor, relative].into_iter().flatten().fold(Bias::none(), |all, bias| all + bias)
}

/// Every rule that was given: a key has to pass them all.
fn mask<T: qkv_simd::Element>(choices: &Choices, given: &Given<T>) -> Result<Mask, Failure> {
    let longest = given.q.axes()[2].max(given.k.axes()[2]);
    let (width, key_width) = (given.q.axes()[3], given.k.axes()[3]);
    if choices.pattern.is_some_and(|pattern| pattern.hash().is_some()) && width != key_width {
        return Err(Failure::new(format!(
            "`--pattern lsh` rotates queries and keys alike, but `q` has a width of {width} and `k` of {key_width}"
        )));
    }
    let pattern = choices.pattern.map(|pattern| pattern.mask(longest)).transpose()?;
    let rules = [
        choices.causal.then(Mask::causal),
        choices.window.map(|window| window.mask()),
        pattern,
        given.key_lengths.is_some().then(Mask::lengths),
        given.segments.is_some().then(Mask::segments),
        given.mask.is_some().then(Mask::bits),
    ];
    Ok(rules.into_iter().flatten().fold(Mask::full(), |all, rule| all & rule))
}
