//! Additive attention of one head, which plans do not support.

use super::launch::{Argument, count};
use super::{Array, Kind, Operations};
use Argument::{Ptr, U32};

/// The inputs of an additive attention of one head, on the device.
#[derive(Clone, Debug)]
pub struct AdditiveCall {
    /// Projected queries `[B, N, A]`.
    pub q: Array,
    /// Projected keys `[B, M, A]`.
    pub k: Array,
    /// Values `[B, M, C]`.
    pub values: Array,
    /// The vector of the score, f32 `[A]`.
    pub v: Array,
    /// The number of keys of each sequence, u32.
    pub lengths: Option<Array>,
    /// `B`, `N`, `M`, `A` and `C`.
    pub sizes: [usize; 5],
    /// How hard attention chooses; `None` for soft attention.
    pub choice: Option<AdditiveChoice>,
}

/// How hard attention chooses a key, and which gradient the scores get.
#[derive(Clone, Copy, Debug)]
pub struct AdditiveChoice {
    /// The seed of a draw from the softmax; without one, the key with the largest score is taken.
    pub seed: Option<u64>,
    /// Whether scores get the gradient they would have with soft weights, instead of that of the log-probability.
    pub straight_through: bool,
}

/// What an additive attention computes.
#[derive(Clone, Debug)]
pub struct AdditiveOutput {
    /// `[B, N, C]`.
    pub values: Array,
    /// The weights of a softmax in f32, `[B, N, M]`.
    pub weights: Array,
    /// The key that hard attention chose, u32 `[B, N]`; `M` if there is none.
    pub chosen: Option<Array>,
}

impl AdditiveCall {
    fn pointers(&self, kind: Kind) -> [u64; 5] {
        let [b, n, m, a, c] = self.sizes;
        [
            self.q.expect(kind, b * n * a),
            self.k.expect(kind, b * m * a),
            self.values.expect(kind, b * m * c),
            self.v.expect(Kind::F32, a),
            self.lengths.as_ref().map_or(0, |lengths| lengths.expect(Kind::U32, b)),
        ]
    }
}

impl Operations {
    /// Computes the attention.
    ///
    /// # Panics
    /// If an array is too short.
    pub fn additive_attention(&self, call: &AdditiveCall) -> AdditiveOutput {
        let [b, n, m, a, c] = call.sizes;
        let (values, weights) = (self.activations(b * n * c), self.empty(Kind::F32, b * n * m, "weights"));
        let chosen = call.choice.map(|_| self.empty(Kind::U32, b * n, "choices"));
        let into = [values.ptr(), weights.ptr(), chosen.as_ref().map_or(0, Array::ptr)];
        let pointers = call.pointers(self.activation_kind()).into_iter().chain(into).map(Ptr);
        let seed = call.choice.and_then(|choice| choice.seed);
        let (sample, seed) = (u32::from(seed.is_some()), seed.unwrap_or(0));
        let draws = [sample, seed as u32, (seed >> 32) as u32].map(U32);
        let arguments: Vec<Argument> = pointers.chain([n, m, a, c].map(count)).chain(draws).collect();
        // SAFETY: `additive_attention` takes these eight pointers and seven numbers.
        unsafe { self.launch("additive_attention", [b * n, 1], &arguments) };
        AdditiveOutput { values, weights, chosen }
    }

    /// Computes the gradients of queries, keys and values; that of the score's vector is added to `sum`, if it is
    /// trained. `d_log_prob`, f32 `[B, N]`, holds the gradients of the log-probabilities of choices; without it, they
    /// are zero.
    ///
    /// # Panics
    /// If an array is too short.
    pub fn additive_gradients(
        &self,
        call: &AdditiveCall,
        out: &AdditiveOutput,
        d_out: &Array,
        d_log_prob: Option<&Array>,
        sum: Option<&Array>,
    ) -> [Array; 3] {
        let ([b, n, m, a, c], kind) = (call.sizes, self.activation_kind());
        let d = [b * n * a, b * m * a, b * m * c].map(|len| self.activations(len));
        let [d_q, d_k, d_values] = &d;
        let d_scores = self.empty(Kind::F32, b * n * m, "gradients of scores");
        let partial = self.empty(Kind::F32, b * n * a, "gradients of a score");
        let [q, k, values, v, lengths] = call.pointers(kind);
        let (p, upstream) = (out.weights.expect(Kind::F32, b * n * m), d_out.expect(kind, b * n * c));
        let chosen = out.chosen.as_ref().map_or(0, |chosen| chosen.expect(Kind::U32, b * n));
        let by_choice = call.choice.is_some_and(|choice| !choice.straight_through);
        let zeros = (by_choice && d_log_prob.is_none()).then(|| self.zeros(Kind::F32, b * n, "gradients of choices"));
        let d_chosen = d_log_prob.or(zeros.as_ref()).filter(|_| by_choice);
        let d_chosen = d_chosen.map_or(0, |d_chosen| d_chosen.expect(Kind::F32, b * n));
        let sizes = [n, m, a, c].map(count);
        let into = [d_scores.ptr(), d_q.ptr(), partial.ptr()];
        let of_queries = [&[q, k, values, v, lengths, p, upstream, chosen, d_chosen][..], &into].concat();
        let of_queries: Vec<Argument> = of_queries.into_iter().map(Ptr).collect();
        let of_keys = [q, k, v, p, upstream, chosen, d_scores.ptr(), d_k.ptr(), d_values.ptr()].map(Ptr);
        // SAFETY: the kernels take these pointers and four numbers; the second reads what the first wrote.
        unsafe {
            self.launch("additive_gradient_queries", [b * n, 1], &[&of_queries[..], &sizes].concat());
            self.launch("additive_gradient_keys", [b * m, 1], &[&of_keys[..], &sizes].concat());
        }
        self.add_partials(&partial, [sum, None], b * n, [a, a]);
        d
    }
}
