//! How one weight came about: the two vectors, what each of their numbers adds to the score, and what was done to the score
//! until it was a weight. Computed in f64 by the plain definition, beside the weight of the fast engine.

use crate::layer::Layer;
use qkv::reference::Reference;
use qkv::{Mask, Score, Select};
use qkv_models::{Error, Result};
use serde::Serialize;

/// One weight, taken apart.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explained {
    /// The query, as the score compares it.
    pub q: Vec<f64>,
    /// The key, likewise.
    pub k: Vec<f64>,
    /// What each number adds to the score.
    pub parts: Parts,
    /// From the score to the weight, one after the other.
    pub terms: Vec<Term>,
    /// The weight, from the engine.
    pub weight: f32,
}

/// What each number of a query and a key adds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Parts {
    /// How: `qᵢ kᵢ`.
    pub name: &'static str,
    /// The numbers.
    pub values: Vec<f64>,
}

/// One step from a score to a weight.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Term {
    /// What happens.
    pub name: String,
    /// How.
    pub formula: String,
    /// What it is then: a number, or a word.
    pub value: Value,
}

/// A number, or a word where there is none.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Value {
    /// A number.
    Number(f64),
    /// A word: `seen`, `absent`, `−∞`.
    Word(&'static str),
}

impl Value {
    fn of(x: f64) -> Value {
        match x {
            x if x == f64::NEG_INFINITY => Value::Word("−∞"),
            x if !x.is_finite() => Value::Word("not a number"),
            x => Value::Number(x),
        }
    }
}

/// The name and the formula of a score, and of its parts.
fn names(score: Score) -> (&'static str, &'static str, &'static str) {
    match score {
        Score::Additive => ("additive score", "Σ vᵢ tanh(qᵢ + kᵢ)", "vᵢ tanh(qᵢ + kᵢ)"),
        Score::Distance => ("distance", "−Σ (qᵢ − kᵢ)²", "−(qᵢ − kᵢ)²"),
        Score::Cosine => ("cosine", "Σ qᵢ kᵢ, both of length 1", "qᵢ kᵢ"),
        Score::General => ("general score", "Σ (Wᵀq)ᵢ kᵢ", "(Wᵀq)ᵢ kᵢ"),
        Score::Linear(_) => ("linear score", "ln Σ φ(q)ᵢ φ(k)ᵢ", "φ(q)ᵢ φ(k)ᵢ"),
        _ => ("dot product", "Σ qᵢ kᵢ", "qᵢ kᵢ"),
    }
}

/// How the weight of a query on a key came about.
///
/// # Errors
/// Where there is no such pair, or the layer's weights were given and not computed.
pub fn explain(layer: &Layer, head: usize, query: usize, key: usize) -> Result<Explained> {
    let [n, m] = layer.size();
    if query >= n || key >= m {
        return Err(Error::invalid(format!("there is no weight of query {query} on key {key}: they are {n} and {m}")));
    }
    let weight = layer.rectangle(head, query..query + 1, key..key + 1)?[[0, 0]];
    let Some(call) = layer.computed() else {
        return Err(Error::invalid("these weights were given: how they came about is not known"));
    };
    let attention = &call.attention;
    let pair = Reference::<f64>::exact().pair(attention, call.inputs.inputs(), [0, head, query, key])?;
    let (name, formula, part) = names(attention.score);
    let mut terms = Vec::new();
    let mut term = |name: &str, formula: String, value: Value| {
        terms.push(Term { name: name.into(), formula, value });
    };
    term(name, formula.into(), Value::of(pair.raw));
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
        term(step.name, formula, Value::of(step.after));
    }
    if attention.mask != Mask::Full || attention.local.is_some() {
        let seen = if pair.seen { "seen" } else { "absent" };
        term("mask", "may the query see the key?".into(), Value::Word(seen));
    }
    let lse = f64::from(call.output.threshold.as_ref().unwrap_or(&call.output.lse)[[0, head, query]]);
    match attention.select {
        Select::Sparsemax => {
            term("threshold of the row", "τ, so that the weights sum to 1".into(), Value::of(lse));
            term("weight", "max(score − τ, 0)".into(), Value::of(f64::from(weight)));
        }
        Select::TopK(k) => {
            term("log-sum-exp of the row", format!("ln Σⱼ exp(scoreⱼ) over the {k} largest"), Value::of(lse));
            term("weight", "exp(score − log-sum-exp) of those, 0 of all others".into(), Value::of(f64::from(weight)));
        }
        Select::Hard(_) => term("weight", "1 for the key that was chosen".into(), Value::of(f64::from(weight))),
        _ => {
            let formula =
                if attention.sinks { "ln (exp(sink) + Σⱼ exp(scoreⱼ))" } else { "ln Σⱼ exp(scoreⱼ)" };
            term("log-sum-exp of the row", formula.into(), Value::of(lse));
            if pair.modulation != 1.0 {
                term("modulation", format!("× {:.6} after the softmax", pair.modulation), Value::of(pair.modulation));
            }
            term("weight", "exp(score − log-sum-exp)".into(), Value::of(f64::from(weight)));
        }
    }
    let parts = Parts { name: part, values: pair.parts };
    Ok(Explained { q: pair.query, k: pair.key, parts, terms, weight })
}
