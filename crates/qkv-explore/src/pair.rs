//! The derivation of one weight: query and key, the contribution of each component to the score, and the steps from
//! score to weight. Computed in f64 by the reference, beside the weight of the engine.

use crate::layer::Layer;
use qkv::reference::Reference;
use qkv::{Mask, Score, Select};
use qkv_models::{Error, Result};
use serde::Serialize;

/// The derivation of one weight.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PairExplanation {
    /// The query, projected or normalized as the score needs it.
    pub q: Vec<f64>,
    /// The key, likewise.
    pub k: Vec<f64>,
    /// The contribution of each component to the score.
    pub parts: Parts,
    /// The steps from score to weight.
    pub terms: Vec<Term>,
    /// The weight that the engine computes.
    pub weight: f32,
}

/// The contributions of components to a score.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Parts {
    /// Their formula: `qᵢ kᵢ`.
    pub name: &'static str,
    /// The contributions.
    pub values: Vec<f64>,
}

/// One step from a score to a weight.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Term {
    /// Name of the step.
    pub name: String,
    /// Its formula.
    pub formula: String,
    /// The value after the step.
    pub value: TermValue,
}

/// A number, or a word if it has no finite value.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum TermValue {
    /// A number.
    Number(f64),
    /// A word: `visible`, `masked`, `−∞`.
    Word(&'static str),
}

impl TermValue {
    fn of(x: f64) -> TermValue {
        match x {
            x if x == f64::NEG_INFINITY => TermValue::Word("−∞"),
            x if !x.is_finite() => TermValue::Word("NaN"),
            x => TermValue::Number(x),
        }
    }
}

/// The name and formula of a score, and the formula of its components.
fn names(score: Score) -> (&'static str, &'static str, &'static str) {
    match score {
        Score::Additive => ("additive score", "Σ vᵢ tanh(qᵢ + kᵢ)", "vᵢ tanh(qᵢ + kᵢ)"),
        Score::Distance => ("distance", "−Σ (qᵢ − kᵢ)²", "−(qᵢ − kᵢ)²"),
        Score::Cosine => ("cosine", "Σ qᵢ kᵢ, both normalized", "qᵢ kᵢ"),
        Score::General => ("general score", "Σ (Wᵀq)ᵢ kᵢ", "(Wᵀq)ᵢ kᵢ"),
        Score::Linear(_) => ("linear score", "ln Σ φ(q)ᵢ φ(k)ᵢ", "φ(q)ᵢ φ(k)ᵢ"),
        _ => ("dot product", "Σ qᵢ kᵢ", "qᵢ kᵢ"),
    }
}

/// Explains the weight of a query on a key.
///
/// # Errors
/// If there is no such pair, or the weights of the layer are stored rather than recomputed.
pub fn explain(layer: &Layer, head: usize, query: usize, key: usize) -> Result<PairExplanation> {
    let [n, m] = layer.size();
    if query >= n || key >= m {
        return Err(Error::invalid(format!(
            "query {query} or key {key} is out of range: there are {n} queries and {m} keys"
        )));
    }
    let weight = layer.rectangle(head, query..query + 1, key..key + 1)?[[0, 0]];
    let Some(call) = layer.call() else {
        return Err(Error::invalid("the file stores these weights without the queries and keys behind them"));
    };
    let attention = &call.attention;
    let pair = Reference::<f64>::exact().pair(attention, call.inputs.inputs(), [0, head, query, key])?;
    let (name, formula, part) = names(attention.score);
    let mut terms = Vec::new();
    let mut term = |name: &str, formula: String, value: TermValue| {
        terms.push(Term { name: name.into(), formula, value });
    };
    term(name, formula.into(), TermValue::of(pair.raw));
    let width = call.inputs.q.shape()[3];
    for step in &pair.steps {
        let by = step.by;
        let formula = match step.name {
            "scale" if by == 1.0 => continue,
            "scale" if attention.score == Score::ScaledDot && (by - 1.0 / (width as f64).sqrt()).abs() < 1e-12 => {
                format!("× 1/√{width}")
            }
            "scale" => format!("× {by:.6}"),
            "soft-cap" => format!("{by} tanh(score / {by})"),
            _ => format!("{}{:.6}", if by < 0.0 { "− " } else { "+ " }, by.abs()),
        };
        term(step.name, formula, TermValue::of(step.after));
    }
    if attention.mask != Mask::Full || attention.local.is_some() {
        let visible = if pair.seen { "visible" } else { "masked" };
        term("mask", "is the key visible to the query?".into(), TermValue::Word(visible));
    }
    let output = call.output()?;
    let lse = f64::from(output.threshold.as_ref().unwrap_or(&output.lse)[[0, head, query]]);
    match attention.select {
        Select::Sparsemax => {
            term("threshold of the row", "τ, so that the weights sum to 1".into(), TermValue::of(lse));
            term("weight", "max(score − τ, 0)".into(), TermValue::of(f64::from(weight)));
        }
        Select::TopK(k) => {
            term("log-sum-exp of the row", format!("ln Σⱼ exp(scoreⱼ) over the {k} largest"), TermValue::of(lse));
            term(
                "weight",
                "exp(score − log-sum-exp) for those, 0 for all others".into(),
                TermValue::of(f64::from(weight)),
            );
        }
        Select::Hard(_) => term("weight", "1 for the chosen key".into(), TermValue::of(f64::from(weight))),
        _ => {
            let formula =
                if attention.sinks { "ln (exp(sink) + Σⱼ exp(scoreⱼ))" } else { "ln Σⱼ exp(scoreⱼ)" };
            term("log-sum-exp of the row", formula.into(), TermValue::of(lse));
            if pair.modulation != 1.0 {
                term(
                    "modulation",
                    format!("× {:.6} after the softmax", pair.modulation),
                    TermValue::of(pair.modulation),
                );
            }
            term("weight", "exp(score − log-sum-exp)".into(), TermValue::of(f64::from(weight)));
        }
    }
    let parts = Parts { name: part, values: pair.parts };
    Ok(PairExplanation { q: pair.query, k: pair.key, parts, terms, weight })
}
