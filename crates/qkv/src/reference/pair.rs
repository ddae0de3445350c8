//! How one score is computed, step by step: the definition for a single pair, for people who want to see it.

use super::{Head, Reference};
use crate::attention::Attention;
use crate::error::{Error, Result};
use crate::inputs::Inputs;
use crate::problem::Problem;
use crate::score::Score;
use qkv_simd::{Element, Real};

/// One pair of a query and a key, and how its score was computed. See [`Reference::pair`].
#[derive(Clone, Debug, PartialEq)]
pub struct Pair<F> {
    /// The query as the score compares it: projected, normalized or mapped if the score does that.
    pub query: Vec<F>,
    /// The key, likewise.
    pub key: Vec<F>,
    /// What each element of the two adds to the raw score; for linear attention, to the number whose logarithm is the
    /// score.
    pub parts: Vec<F>,
    /// The score before anything else.
    pub raw: F,
    /// The steps that follow, in order, each with the score after it.
    pub steps: Vec<Step<F>>,
    /// Whether the query sees the key at all.
    pub seen: bool,
    /// The final score; −∞ if the key is not seen.
    pub score: F,
    /// The factor of the weight after the softmax: dropout, and the Gaussian of predictive local attention.
    pub modulation: F,
}

/// A step in the computation of a score.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step<F> {
    /// Its name: `scale`, `soft-cap`, `alibi`, `bias` or `relative`.
    pub name: &'static str,
    /// By how much: the factor, the cap, or what was added.
    pub by: F,
    /// The score after it.
    pub after: F,
}

impl<F: Real> Reference<F> {
    /// One pair of head `h` of sequence `b`: query `i`, key `j`.
    ///
    /// ```
    /// use qkv::{reference::Reference, Attention, Inputs, Tensor};
    /// let x = Tensor::<f32, 4>::randn([1, 1, 4, 16], 1);
    /// let pair = Reference::<f64>::exact().pair(&Attention::scaled_dot(), Inputs::new(&x, &x, &x), [0, 0, 2, 3])?;
    /// assert!((pair.parts.iter().sum::<f64>() - pair.raw).abs() < 1e-12);
    /// assert_eq!((pair.steps[0].name, pair.steps[0].by), ("scale", 0.25));
    /// # Ok::<(), qkv::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of a call, and a pair outside the weights.
    pub fn pair<T: Element>(&self, attention: &Attention, inputs: Inputs<'_, T>, at: [usize; 4]) -> Result<Pair<F>> {
        let problem = Problem::new(attention, inputs)?;
        let [b, h, i, j] = at;
        let limits = [problem.b, problem.heads.query, problem.n, problem.m];
        if at.iter().zip(limits).any(|(&at, limit)| at >= limit) {
            return Err(Error::value("pair", format!("{at:?}"), format!("below {limits:?}")));
        }
        let head = Head::<F, T>::over(&problem, b, h, i..i + 1, j..j + 1);
        let made = head.score(i, j);
        let (query, key) = (head.query[0].clone(), head.key[0].clone());
        let part = |x: usize| match attention.score {
            Score::Distance => -((query[x] - key[x]) * (query[x] - key[x])),
            // φ(q) and φ(k) are stored as exponents.
            Score::Linear(crate::Features::Favor { count, .. }) => {
                (query[x] + key[x]).exp() / F::from_f64(count as f64)
            }
            _ => head.part(&query, &key, x),
        };
        let parts = (0..query.len()).map(part).collect();
        let (mut score, mut steps) = (made.raw, Vec::new());
        let mut step = |name, by, after| {
            score = after;
            steps.push(Step { name, by, after });
        };
        let mut now = made.raw * head.scale;
        step("scale", head.scale, now);
        if let Some(cap) = attention.softcap.map(F::from_f64) {
            now = cap * (now / cap).tanh();
            step("soft-cap", cap, now);
        }
        let added = [("alibi", head.alibi(i, j)), ("bias", head.bias(i, j)), ("relative", head.relative(i, j))];
        for (name, by) in added {
            if let Some(by) = by {
                now += by;
                step(name, by, now);
            }
        }
        let seen = head.sees(i, j);
        let score = if seen { score } else { F::NEG_INFINITY };
        Ok(Pair { query, key, parts, raw: made.raw, steps, seen, score, modulation: head.modulation(i, j) })
    }
}
