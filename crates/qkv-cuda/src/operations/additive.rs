//! Additive attention of one head, which plans do not have.

use super::launch::{Argument, count};
use super::{Array, Kind, Operations};
use Argument::Ptr;

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
    /// The output `[B, N, C]`, and the weights in f32, `[B, N, M]`.
    ///
    /// # Panics
    /// Where an array is too short.
    pub fn additive_attention(&self, call: &AdditiveCall) -> [Array; 2] {
        let [b, n, m, a, c] = call.sizes;
        let (out, weights) = (self.activations(b * n * c), self.empty(Kind::F32, b * n * m, "weights"));
        let pointers = call.pointers(self.activation_kind()).into_iter().chain([out.ptr(), weights.ptr()]);
        let arguments: Vec<Argument> = pointers.map(Ptr).chain([n, m, a, c].map(count)).collect();
        // SAFETY: `additive_attention` takes these seven pointers and four numbers.
        unsafe { self.launch("additive_attention", [b * n, 1], &arguments) };
        [out, weights]
    }

    /// The gradients of queries, keys and values; that of the score's vector is added to `sum`, where it is trained.
    ///
    /// # Panics
    /// Where an array is too short.
    pub fn additive_gradients(
        &self,
        call: &AdditiveCall,
        weights: &Array,
        d_out: &Array,
        sum: Option<&Array>,
    ) -> [Array; 3] {
        let ([b, n, m, a, c], kind) = (call.sizes, self.activation_kind());
        let d = [b * n * a, b * m * a, b * m * c].map(|len| self.activations(len));
        let [d_q, d_k, d_values] = &d;
        let d_scores = self.empty(Kind::F32, b * n * m, "gradients of scores");
        let partial = self.empty(Kind::F32, b * n * a, "gradients of a score");
        let [q, k, values, v, lengths] = call.pointers(kind);
        let (p, upstream) = (weights.expect(Kind::F32, b * n * m), d_out.expect(kind, b * n * c));
        let sizes = [n, m, a, c].map(count);
        let of_queries = [q, k, values, v, lengths, p, upstream, d_scores.ptr(), d_q.ptr(), partial.ptr()].map(Ptr);
        let of_keys = [q, k, v, p, upstream, d_scores.ptr(), d_k.ptr(), d_values.ptr()].map(Ptr);
        // SAFETY: the kernels take these pointers and four numbers; the second reads what the first wrote.
        unsafe {
            self.launch("additive_gradient_queries", [b * n, 1], &[&of_queries[..], &sizes].concat());
            self.launch("additive_gradient_keys", [b * m, 1], &[&of_keys[..], &sizes].concat());
        }
        self.add_partials(&partial, [sum, None], b * n, [a, a]);
        d
    }
}
