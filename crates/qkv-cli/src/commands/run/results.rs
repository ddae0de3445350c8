//! The tensors that come out of a call, by the names and in the shapes in which they are written: a gradient has the
//! shape in which its tensor was given.

use crate::computation::Computed;
use crate::given::{Array, Given};
use crate::number::{Number, Stored};
use crate::target::Named;
use qkv::Tensor;

/// Everything that a call gave, in the order in which people read it.
pub(crate) fn results<T: Number>(given: &Given<T>, computed: Computed<T>) -> Vec<Named> {
    let Computed { out, weights, gradients, .. } = computed;
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
    let numbers = |tensor: Option<Tensor<T, 4>>| tensor.map(Tensor::into_data);
    let optional = [
        ("d_bias", &given.bias, numbers(d.bias)),
        ("d_table", &given.table, numbers(d.table)),
        ("d_scale", &given.scale, d.scale),
        ("d_sinks", &given.sinks, d.sinks),
        ("d_center", &given.center, d.center),
        ("d_w", &given.w, numbers(d.w)),
        ("d_w_q", &given.w_q, numbers(d.w_q)),
        ("d_w_k", &given.w_k, numbers(d.w_k)),
        ("d_v_score", &given.v_score, d.v_score),
    ];
    all.extend(optional.into_iter().filter_map(|(name, given, data)| {
        let Array { shape, .. } = given.as_ref()?;
        Some(Named { name: name.into(), shape: shape.clone(), numbers: Box::new(data?) })
    }));
    all
}

fn tensor<T: Stored, const R: usize>(name: &str, tensor: Tensor<T, R>) -> Named {
    Named { name: name.into(), shape: tensor.shape().to_vec(), numbers: Box::new(tensor.into_data()) }
}
