//! What a head does, in numbers. Each is a mean over the queries that it is defined for; rows of weights are recomputed a block
//! at a time, and of a long sequence only some queries, spread evenly, are looked at.
//!
//! With `w` the weights of a head, `p(i)` the key at which query `i` stands, and `t` the tokens:
//!
//! | measure | mean over the queries `i` of | where |
//! | --- | --- | --- |
//! | entropy | `−Σⱼ wᵢⱼ ln wᵢⱼ` | everywhere |
//! | first | `wᵢ₀` | everywhere |
//! | previous | `w(i, p(i) − 1)`, where `p(i) ≥ 1` | from a sequence to itself |
//! | itself | `w(i, p(i))` | from a sequence to itself |
//! | induction | `Σⱼ wᵢⱼ` over `1 ≤ j ≤ p(i)` with `t(j − 1) = t(p(i))`, where there is such a `j` (Olsson et al. 2022, arXiv:2209.11895) | from a sequence to itself |
//! | distance | `Σⱼ wᵢⱼ \|p(i) − j\|` | from a sequence to itself |
//! | above | the share of the keys `j` with `wᵢⱼ >` a threshold | everywhere |
//! | importance | the gradient of the loss with respect to a gate on the head, its size (Michel et al. 2019, arXiv:1905.10650) | where a model computed it |

use crate::recording::Recording;
use qkv_models::Result;
use serde::Serialize;
use std::collections::HashMap;

/// Queries that are looked at, at most.
const MOST: usize = 2048;
/// Rows that are recomputed at a time.
const BLOCK: usize = 256;
/// From which weight on a key counts as looked at, unless asked otherwise.
pub const THRESHOLD: f32 = 0.1;

/// The measures, in the order of [`Measured::values`].
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

/// A measure: what it is called and how it is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Measure {
    /// Its name.
    pub id: &'static str,
    /// In one line.
    pub formula: &'static str,
    /// What it is counted in.
    pub unit: &'static str,
}

/// A head, measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// Which layer.
    pub layer: usize,
    /// Which head of it.
    pub head: usize,
    /// One for each of [`MEASURES`]; none where it is not defined.
    pub values: [Option<f64>; MEASURES.len()],
}

/// Which queries of a sequence are looked at: all, or some spread evenly.
fn queries(n: usize) -> Vec<usize> {
    match n <= MOST {
        true => (0..n).collect(),
        false => (0..MOST).map(|at| at * n / MOST).collect(),
    }
}

/// Whether the measures of a recording look at some of its queries only.
pub fn is_sampled(recording: &Recording) -> bool {
    recording.layers.iter().any(|layer| layer.size()[0] > MOST)
}

/// Measures every head.
///
/// # Errors
/// Where weights cannot be computed.
pub fn measure(recording: &Recording, threshold: f32) -> Result<Vec<Measured>> {
    let mut all = Vec::new();
    for (layer, of) in recording.layers.iter().enumerate() {
        let follows = recording.is_own(layer).then(|| Followers::of(recording, layer));
        for head in 0..of.heads() {
            let mut values = one(recording, layer, head, threshold, follows.as_ref())?;
            values[7] = of.importance.as_ref().map(|importance| importance[head]);
            all.push(Measured { layer, head, values });
        }
    }
    Ok(all)
}

/// Adds the importance of heads, by layer and head.
pub fn with_importance(measured: &mut [Measured], importance: &[Vec<f64>]) {
    for one in measured {
        one.values[7] = importance.get(one.layer).and_then(|layer| layer.get(one.head)).copied();
    }
}

/// For each token, the places right behind its occurrences.
struct Followers {
    /// The class of each token: equal tokens have equal classes.
    classes: Vec<usize>,
    behind: Vec<Vec<usize>>,
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
        let mut behind = vec![Vec::new(); known.len()];
        for (at, &class) in classes.iter().enumerate().take(classes.len().saturating_sub(1)) {
            behind[class].push(at + 1);
        }
        Followers { classes, behind }
    }

    /// The keys `j ≤ p` that follow an earlier token equal to that at `p`.
    fn before(&self, p: usize) -> &[usize] {
        let all = &self.behind[self.classes[p]];
        &all[..all.partition_point(|&j| j <= p)]
    }
}

/// A sum and how many it is of.
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

fn one(
    recording: &Recording,
    layer: usize,
    head: usize,
    threshold: f32,
    follows: Option<&Followers>,
) -> Result<[Option<f64>; MEASURES.len()]> {
    let of = &recording.layers[layer];
    let [n, m] = of.size();
    let mut means = [Mean::default(); 7];
    let chosen = queries(n);
    for block in chosen.chunks(BLOCK) {
        let weights = of.rows_at(head, block)?; // [block, M]
        for (&i, row) in block.iter().zip(weights.data().chunks_exact(m.max(1))) {
            let entropy = -row.iter().filter(|&&w| w > 0.0).map(|&w| f64::from(w) * f64::from(w).ln()).sum::<f64>();
            means[0].add(entropy);
            means[1].add(f64::from(row[0]));
            means[6].add(row.iter().filter(|&&w| w > threshold).count() as f64 / m as f64);
            let (Some(follows), Some(p)) = (follows, of.place(i)) else { continue };
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
