//! Statistics of attention heads. Each is a mean over the queries for which it is defined. Rows of weights are
//! recomputed a block at a time; long sequences are sampled at evenly spaced queries.
//!
//! With `w` the weights of a head, `p(i)` the key position of query `i`, and `t` the tokens:
//!
//! | measure | mean over the queries `i` of | where |
//! | --- | --- | --- |
//! | entropy | `−Σⱼ wᵢⱼ ln wᵢⱼ` | everywhere |
//! | first | `wᵢ₀` | everywhere |
//! | previous | `w(i, p(i) − 1)`, where `p(i) ≥ 1` | self-attention |
//! | itself | `w(i, p(i))` | self-attention |
//! | induction | `Σⱼ wᵢⱼ` over `1 ≤ j ≤ p(i)` with `t(j − 1) = t(p(i))`, if there is such a `j` \[1\] | self-attention |
//! | distance | `Σⱼ wᵢⱼ \|p(i) − j\|` | self-attention |
//! | above | the share of the keys `j` with `wᵢⱼ >` a threshold | everywhere |
//! | importance | magnitude of the gradient of the loss with respect to a gate on the head \[2\] | if a model computed it |
//!
//! \[1\] Olsson et al. 2022, arXiv:2209.11895. \[2\] Michel et al. 2019, arXiv:1905.10650.

use crate::recording::Recording;
use qkv_models::Result;
use serde::Serialize;
use std::collections::HashMap;

/// Maximum number of sampled queries.
const MAX_QUERIES: usize = 2048;
/// Rows recomputed at a time.
const BLOCK: usize = 256;
/// Default threshold of the measure `above`.
pub const THRESHOLD: f32 = 0.1;

/// The measures, in the order of [`HeadMeasures::values`].
pub const MEASURES: [Measure; 8] = [
    Measure { id: "entropy", formula: "mean over queries i of −Σⱼ wᵢⱼ ln wᵢⱼ", unit: "nats" },
    Measure { id: "first", formula: "mean over queries i of wᵢ₀, the weight on the first token", unit: "" },
    Measure { id: "previous", formula: "mean over queries i of the weight on the token before", unit: "" },
    Measure { id: "itself", formula: "mean over queries i of wᵢᵢ", unit: "" },
    Measure { id: "induction", formula: "weight on tokens that follow an earlier occurrence of this one", unit: "" },
    Measure { id: "distance", formula: "mean over queries i of Σⱼ wᵢⱼ |i − j|", unit: "tokens" },
    Measure { id: "above", formula: "share of the keys with a weight above 0.1", unit: "" },
    Measure { id: "importance", formula: "|∂ loss / ∂ gate| of the head", unit: "" },
];

/// A measure and its formula.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Measure {
    /// Its name.
    pub id: &'static str,
    /// Its formula, in one line.
    pub formula: &'static str,
    /// Its unit, or empty.
    pub unit: &'static str,
}

/// The measures of one head.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HeadMeasures {
    /// Index of the layer.
    pub layer: usize,
    /// Index of the head.
    pub head: usize,
    /// One value per entry of [`MEASURES`]; `None` where it is not defined.
    pub values: [Option<f64>; MEASURES.len()],
}

/// The queries that are measured: all, or evenly spaced ones.
fn sampled_queries(n: usize) -> Vec<usize> {
    match n <= MAX_QUERIES {
        true => (0..n).collect(),
        false => (0..MAX_QUERIES).map(|at| at * n / MAX_QUERIES).collect(),
    }
}

/// Whether a recording is long enough for its queries to be sampled.
pub fn is_sampled(recording: &Recording) -> bool {
    recording.layers.iter().any(|layer| layer.size()[0] > MAX_QUERIES)
}

/// Measures every head.
///
/// # Errors
/// If weights cannot be computed.
pub fn measure(recording: &Recording, threshold: f32) -> Result<Vec<HeadMeasures>> {
    let mut all = Vec::new();
    for (layer, of) in recording.layers.iter().enumerate() {
        let follows = recording.is_self_attention(layer).then(|| Followers::of(recording, layer));
        for head in 0..of.heads() {
            let mut values = measure_head(recording, layer, head, threshold, follows.as_ref())?;
            values[7] = of.importance.as_ref().map(|importance| importance[head]);
            all.push(HeadMeasures { layer, head, values });
        }
    }
    Ok(all)
}

/// Sets the importance of heads, by layer and head.
pub fn with_importance(measured: &mut [HeadMeasures], importance: &[Vec<f64>]) {
    for one in measured {
        one.values[7] = importance.get(one.layer).and_then(|layer| layer.get(one.head)).copied();
    }
}

/// For each token, the positions right after its occurrences.
struct Followers {
    /// The class of each token: equal tokens have equal classes.
    classes: Vec<usize>,
    after: Vec<Vec<usize>>,
}

impl Followers {
    fn of(recording: &Recording, layer: usize) -> Followers {
        let side = recording.keys(layer);
        let mut known: HashMap<(Option<u32>, &str), usize> = HashMap::new();
        let mut classes = Vec::with_capacity(side.len());
        for token in &side.tokens {
            let key = if token.id.is_some() { (token.id, "") } else { (None, token.text.as_str()) };
            let count = known.len();
            classes.push(*known.entry(key).or_insert(count));
        }
        let mut after = vec![Vec::new(); known.len()];
        for (at, &class) in classes.iter().enumerate().take(classes.len().saturating_sub(1)) {
            after[class].push(at + 1);
        }
        Followers { classes, after }
    }

    /// The keys `j ≤ p` that follow an earlier token equal to that at `p`.
    fn before(&self, p: usize) -> &[usize] {
        let all = &self.after[self.classes[p]];
        &all[..all.partition_point(|&j| j <= p)]
    }
}

/// A running mean.
#[derive(Clone, Copy, Default)]
struct Mean {
    sum: f64,
    count: usize,
}

impl Mean {
    fn add(&mut self, x: f64) {
        self.sum += x;
        self.count += 1;
    }

    fn get(self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / self.count as f64)
    }
}

fn measure_head(
    recording: &Recording,
    layer: usize,
    head: usize,
    threshold: f32,
    follows: Option<&Followers>,
) -> Result<[Option<f64>; MEASURES.len()]> {
    let of = &recording.layers[layer];
    let [n, m] = of.size();
    let mut means = [Mean::default(); 7];
    let queries = sampled_queries(n);
    for block in queries.chunks(BLOCK) {
        let weights = of.rows_at(head, block)?; // [block, M]
        for (&i, row) in block.iter().zip(weights.data().chunks_exact(m.max(1))) {
            let entropy = -row.iter().filter(|&&w| w > 0.0).map(|&w| f64::from(w) * f64::from(w).ln()).sum::<f64>();
            means[0].add(entropy);
            means[1].add(f64::from(row[0]));
            means[6].add(row.iter().filter(|&&w| w > threshold).count() as f64 / m as f64);
            let (Some(follows), Some(p)) = (follows, of.key_of_query(i)) else { continue };
            if p > 0 {
                means[2].add(f64::from(row[p - 1]));
            }
            means[3].add(f64::from(row[p]));
            let behind = follows.before(p);
            if !behind.is_empty() {
                means[4].add(behind.iter().map(|&j| f64::from(row[j])).sum());
            }
            means[5].add(row.iter().enumerate().map(|(j, &w)| f64::from(w) * j.abs_diff(p) as f64).sum());
        }
    }
    let mut values = [None; MEASURES.len()];
    values.iter_mut().zip(means).for_each(|(value, mean)| *value = mean.get());
    Ok(values)
}
