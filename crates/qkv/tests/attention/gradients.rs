//! Promise 3: gradients for every input and every parameter, held to finite differences in f64. The loss is a random
//! sum of all outputs: values, log-sum-exp and entropy.

use qkv::{Attention, Bias, Gradients, Mask, Place, Score};
use qkv_conformance::case::{Case, Data, Extras, Sizes};

const SCORES: [Score; 6] =
    [Score::Dot, Score::ScaledDot, Score::General, Score::Additive, Score::Cosine, Score::Distance];

fn loss(case: &Case, data: &Data<f64>) -> f64 {
    let out = case.attention.forward(data.inputs()).unwrap();
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).filter(|(a, _)| a.is_finite()).map(|(a, b)| a * b).sum::<f64>();
    dot(out.values.data(), data.d_out.data())
        + data.d_lse.as_ref().map_or(0.0, |d| dot(out.lse.data(), d))
        + data.d_entropy.as_ref().map_or(0.0, |d| dot(out.entropy.as_ref().unwrap().data(), d))
        + data.d_log_prob.as_ref().map_or(0.0, |d| dot(out.log_prob.as_ref().unwrap().data(), d))
}

/// A parameter of a case, to be perturbed.
type Part = fn(&mut Data<f64>) -> Option<&mut [f64]>;

/// Its gradient.
type Of = fn(&Gradients<f64>) -> Option<&[f64]>;

/// Each parameter beside its gradient.
const PARTS: [(&str, Part, Of); 12] = [
    ("q", |d| Some(d.q.data_mut()), |g| Some(g.q.data())),
    ("k", |d| Some(d.k.data_mut()), |g| Some(g.k.data())),
    ("v", |d| Some(d.v.data_mut()), |g| Some(g.v.data())),
    ("w", |d| d.w.as_mut().map(|t| t.data_mut()), |g| g.w.as_ref().map(|t| t.data())),
    ("w_q", |d| d.w_q.as_mut().map(|t| t.data_mut()), |g| g.w_q.as_ref().map(|t| t.data())),
    ("w_k", |d| d.w_k.as_mut().map(|t| t.data_mut()), |g| g.w_k.as_ref().map(|t| t.data())),
    ("v_score", |d| d.v_score.as_deref_mut(), |g| g.v_score.as_deref()),
    ("scale", |d| d.scale.as_deref_mut(), |g| g.scale.as_deref()),
    ("bias", |d| d.bias.as_mut().map(|t| t.data_mut()), |g| g.bias.as_ref().map(|t| t.data())),
    ("table", |d| d.table.as_mut().map(|t| t.data_mut()), |g| g.table.as_ref().map(|t| t.data())),
    ("sinks", |d| d.sinks.as_deref_mut(), |g| g.sinks.as_deref()),
    ("center", |d| d.center.as_deref_mut(), |g| g.center.as_deref()),
];

fn gradients_are_differences(case: &Case) {
    let mut data = case.data::<f64>();
    let out = case.attention.forward(data.inputs()).unwrap();
    let grad = case.attention.backward(data.inputs(), &out, data.upstream()).unwrap();
    for (name, part, of) in PARTS {
        let Some(grad) = of(&grad) else {
            assert!(part(&mut data).is_none(), "{}: no gradient for {name}", case.name);
            continue;
        };
        let count = grad.len();
        let largest = grad.iter().fold(0.0f64, |a, b| a.max(b.abs()));
        // Every number of small parameters, some of large ones.
        for at in (0..count).step_by((count / 12).max(1)) {
            let step = 1e-5;
            let mut moved = |by: f64| {
                part(&mut data).unwrap()[at] += by;
                let loss = loss(case, &data);
                part(&mut data).unwrap()[at] -= by;
                loss
            };
            let difference = (moved(step) - moved(-step)) / (2.0 * step);
            let apart = (difference - grad[at]).abs();
            assert!(
                apart <= 1e-7 * largest.max(1.0),
                "{} {name}[{at}]: {} but moves by {difference}",
                case.name,
                grad[at]
            );
        }
    }
}

#[test]
fn every_gradient_is_what_the_loss_moves_by() {
    for score in SCORES {
        let sizes = Sizes::new(9, 140, 5).heads(2, 4, 2).widths(5, 3);
        let extras = Extras {
            bias: Some([false, true, true, true]),
            table: Some((3, true)),
            scale: Some(true),
            sinks: true,
            all_upstream: true,
            ..Extras::default()
        };
        let attention = Attention::new(score).temperature(1.3).softcap(4.0).bias(Bias::alibi());
        let masked = attention.mask(Mask::causal() & Mask::window(90, 0)).place(Place::End);
        gradients_are_differences(&Case::new(format!("{score:?} with everything"), masked, sizes, extras));
        gradients_are_differences(&Case::new(
            format!("{score:?} alone"),
            Attention::new(score),
            sizes,
            Extras::default(),
        ));
        let dropped = Attention::new(score).dropout(0.4);
        gradients_are_differences(&Case::new(format!("{score:?} with dropout"), dropped, sizes, Extras::default()));
    }
}

#[test]
fn gradients_go_through_widths_that_differ_and_matrices_of_each_head() {
    let sizes = Sizes::new(7, 20, 4).heads(2, 4, 2).widths(6, 3);
    for score in [Score::General, Score::Additive] {
        for matrix_per_head in [false, true] {
            let extras = Extras { matrix_per_head, all_upstream: true, ..Extras::default() };
            gradients_are_differences(&Case::new(
                format!("{score:?} {matrix_per_head}"),
                Attention::new(score),
                sizes,
                extras,
            ));
        }
    }
    let extras = Extras { projected: true, ..Extras::default() };
    gradients_are_differences(&Case::new("projected keys", Attention::additive(), sizes, extras));
}

#[test]
fn gradients_go_through_masks_that_bring_their_own_order() {
    let attention = Attention::scaled_dot().mask(Mask::causal() & Mask::strided(24));
    let extras = Extras { table: Some((4, false)), all_upstream: true, ..Extras::default() };
    gradients_are_differences(&Case::new("strided", attention, Sizes::new(520, 520, 3), extras));
}

#[test]
fn selections_and_centres_have_the_gradients_of_what_they_return() {
    let sizes = Sizes::new(9, 140, 5).heads(2, 4, 2).widths(5, 3);
    for score in SCORES {
        let extras = Extras { bias: Some([false, true, true, true]), all_upstream: true, ..Extras::default() };
        let attention = Attention::new(score).softcap(6.0).mask(Mask::causal()).place(Place::End);
        for (name, attention) in [
            ("hard", attention.clone().hard()),
            ("sampled", attention.clone().sample()),
            ("top-k", attention.clone().top_k(6)),
            ("sparsemax", attention.clone().sparsemax()),
            ("local", attention.clone().local(11)),
        ] {
            gradients_are_differences(&Case::new(format!("{score:?} {name}"), attention, sizes, extras.clone()));
        }
    }
}
