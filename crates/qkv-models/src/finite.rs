//! Outputs that are NaN or infinite. A model whose weights are damaged or whose training diverged must not answer as if
//! nothing were wrong, so every model checks its logits before they are turned into text, labels or vectors.

use crate::{Error, Result};
use qkv_nn::Parameters;
use qkv_simd::Isa;
use qkv_simd::logits::all_finite;

/// Refuses non-finite outputs, naming the first parameter that is not finite.
///
/// # Errors
/// If an output is NaN or infinite.
pub(crate) fn check(outputs: &[f32], parameters: &Parameters<f32>) -> Result<()> {
    if all_finite(Isa::best(), outputs) { Ok(()) } else { Err(refusal(parameters)) }
}

/// The error for non-finite outputs.
pub(crate) fn refusal(parameters: &Parameters<f32>) -> Error {
    let finite = |param: &qkv_nn::Param| parameters.values(*param).iter().all(|x| x.is_finite());
    match parameters.all().find(|param| !finite(param)) {
        Some(param) => {
            let what = format!("the model computes NaN: its parameter `{}` is not finite", parameters.name(param));
            Error::invalid(what).with_hint("the weights are damaged, or training diverged: use an earlier checkpoint")
        }
        None => Error::invalid("the model computes NaN, although all of its parameters are finite")
            .with_hint("activations overflow: the weights may be those of another architecture"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use qkv_nn::Init;
    use qkv_nn::layers::Builder;

    #[test]
    fn the_first_parameter_that_is_not_finite_is_named() {
        let mut parameters = Parameters::<f32>::new();
        let mut at = Builder::new(&mut parameters, 1);
        at.add("layers.0.weight", &[2], Init::Ones);
        let second = at.add("layers.1.weight", &[2], Init::Ones);
        assert!(check(&[1.0, -2.0], &parameters).is_ok());
        assert!(check(&[1.0, f32::INFINITY], &parameters).unwrap_err().to_string().contains("are finite"));
        parameters.get_mut(second)[1] = f32::NAN;
        let error = check(&[f32::NAN], &parameters).unwrap_err().to_string();
        assert_eq!(error, "the model computes NaN: its parameter `layers.1.weight` is not finite");
    }
}
