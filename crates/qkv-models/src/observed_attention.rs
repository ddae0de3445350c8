//! One attention of a captured pass, from which its weights are recomputed.

use crate::model::{AttentionSite, Group};
use crate::{Error, Result};
use qkv::{Attention, Output, OwnedInputs, Place, Tensor};
use qkv_nn::{Captured, Parameters};

/// One attention of a pass.
#[derive(Clone, Debug)]
pub struct ObservedAttention {
    /// The part of the model it belongs to.
    pub group: Group,
    /// Its layer in that part.
    pub layer: usize,
    /// The attention that was computed.
    pub attention: Attention,
    /// Its inputs.
    pub inputs: OwnedInputs<f32>,
    /// Its output.
    pub output: Output<f32>,
}

impl ObservedAttention {
    /// The weights of one head, `[N, M]`, recomputed exactly.
    ///
    /// # Errors
    /// If there is no such head.
    pub fn weights(&self, head: usize) -> Result<Tensor<f32, 2>> {
        let rows = 0..self.inputs.q.shape()[2];
        Ok(self.attention.weights(self.inputs.inputs(), &self.output)?.rows(0, head, rows)?)
    }
}

impl ObservedAttention {
    /// The mean of the weights over the heads: a row for each query, a weight for each key.
    ///
    /// # Errors
    /// Errors from `qkv`.
    pub fn mean_over_heads(&self) -> Result<Vec<Vec<f32>>> {
        let [_, heads, queries, _] = self.inputs.q.shape();
        let keys = self.inputs.k.shape()[2];
        let mut weights = vec![vec![0.0f32; keys]; queries];
        for head in 0..heads {
            let of_head = self.weights(head)?;
            for (sums, row) in weights.iter_mut().zip(of_head.data().chunks_exact(keys.max(1))) {
                sums.iter_mut().zip(row).for_each(|(sum, &w)| *sum += w / heads as f32);
            }
        }
        Ok(weights)
    }
}

/// The self-attentions of a stack of layers.
pub(crate) fn stacked(
    group: Group,
    captured: &[Captured<f32>],
    parameters: &Parameters<f32>,
) -> Result<Vec<ObservedAttention>> {
    let site = |layer: usize| AttentionSite { group, layer, label: format!("layers.{layer}.self_attn") };
    (0..captured.len()).map(site).map(|site| observed(&site, &site.calls(captured), parameters)).collect()
}

/// The attention of a site: the captured call, or, for a model that decodes step by step, the steps merged as the
/// queries of one call.
pub(crate) fn observed(
    site: &AttentionSite,
    calls: &[&Captured<f32>],
    parameters: &Parameters<f32>,
) -> Result<ObservedAttention> {
    let &AttentionSite { group, layer, .. } = site;
    let first = calls.first().ok_or_else(|| Error::invalid(format!("`{}` was not computed", site.label)))?;
    let (mut attention, mut inputs) = (first.attention().clone(), first.inputs(parameters));
    if calls.len() == 1 {
        return Ok(ObservedAttention { group, layer, attention, inputs, output: first.output().clone() });
    }
    // The queries of the steps side by side, [1, H, steps, D], each at its own position.
    let steps: Vec<OwnedInputs<f32>> = calls.iter().map(|step| step.inputs(parameters)).collect();
    let [_, heads, _, width] = inputs.q.shape();
    inputs.q = Tensor::from_fn([1, heads, steps.len(), width], |[_, h, step, x]| steps[step].q[[0, h, 0, x]]);
    inputs.positions = Some((0..steps.len() as i64).collect());
    let places = (0..heads).flat_map(|h| (0..steps.len()).map(move |step| (h, step)));
    inputs.center = places.map(|(h, step)| steps[step].center.as_ref().map(|center| center[h])).collect();
    attention.place = Place::Given;
    let output = attention.forward(inputs.inputs())?;
    Ok(ObservedAttention { group, layer, attention, inputs, output })
}
