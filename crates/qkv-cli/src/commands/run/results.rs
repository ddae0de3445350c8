//! The output tensors of a call, with their names and shapes in the file. A gradient has the shape of its tensor in the
//! input file.

use super::compute::RunOutput;
use super::target::OutputTensor;
use super::tensors::{Array, InputTensors};
use crate::dtype::{Computable, Stored};
use qkv::Tensor;

/// All output tensors, in the order of the report.
pub(crate) fn results<T: Computable>(tensors: &InputTensors<T>, output: RunOutput<T>) -> Vec<OutputTensor> {
    let RunOutput { out, weights, gradients, .. } = output;
    let mut all = vec![tensor("out", out.values)];
    all.push(match out.threshold {
        Some(threshold) => tensor("threshold", threshold),
        None => tensor("lse", out.lse),
    });
    all.extend(out.chosen.map(|chosen| tensor("chosen", chosen)));
    all.extend(out.log_prob.map(|log_prob| tensor("log_prob", log_prob)));
    all.extend(weights.map(|weights| tensor("weights", weights)));
    let Some(d) = gradients else { return all };
    all.extend([tensor("d_q", d.q), tensor("d_k", d.k), tensor("d_v", d.v)]);
    let elements = |tensor: Option<Tensor<T, 4>>| tensor.map(Tensor::into_data);
    let optional = [
        ("d_bias", &tensors.bias, elements(d.bias)),
        ("d_table", &tensors.table, elements(d.table)),
        ("d_scale", &tensors.scale, d.scale),
        ("d_sinks", &tensors.sinks, d.sinks),
        ("d_center", &tensors.center, d.center),
        ("d_w", &tensors.w, elements(d.w)),
        ("d_w_q", &tensors.w_q, elements(d.w_q)),
        ("d_w_k", &tensors.w_k, elements(d.w_k)),
        ("d_v_score", &tensors.v_score, d.v_score),
    ];
    all.extend(optional.into_iter().filter_map(|(name, tensors, data)| {
        let Array { shape, .. } = tensors.as_ref()?;
        Some(OutputTensor { name: name.into(), shape: shape.clone(), elements: Box::new(data?) })
    }));
    all
}

fn tensor<T: Stored, const R: usize>(name: &str, tensor: Tensor<T, R>) -> OutputTensor {
    OutputTensor { name: name.into(), shape: tensor.shape().to_vec(), elements: Box::new(tensor.into_data()) }
}
