//! One case: a description, sizes, and all the data that the description needs.

use qkv::{Attention, Bias, Element, Inputs, Lsh, Mask, Place, Score, Select, Tensor, Upstream};

/// The sizes of a case.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Sequences.
    pub b: usize,
    /// Query heads.
    pub hq: usize,
    /// Key heads.
    pub hk: usize,
    /// Queries.
    pub n: usize,
    /// Keys.
    pub m: usize,
    /// The width of queries.
    pub d: usize,
    /// The width of keys; equal to `d` except for general and additive scores.
    pub dk: usize,
    /// The width of values.
    pub dv: usize,
}

impl Sizes {
    /// One sequence of one head, `n` queries and `m` keys, all of width `d`.
    pub fn new(n: usize, m: usize, d: usize) -> Sizes {
        Sizes { b: 1, hq: 1, hk: 1, n, m, d, dk: d, dv: d }
    }

    /// With this many sequences, query heads and key heads.
    pub fn heads(self, b: usize, hq: usize, hk: usize) -> Sizes {
        Sizes { b, hq, hk, ..self }
    }

    /// With these widths of keys and values.
    pub fn widths(self, dk: usize, dv: usize) -> Sizes {
        Sizes { dk, dv, ..self }
    }
}

/// The shape of a bias tensor or a mask of bits: `true` for an axis of `[B, Hq, N, M]` of full length, `false` for one
/// of length 1.
pub type Axes = [bool; 4];

/// The options of a case besides its score.
#[derive(Clone, Debug, Default)]
pub struct Extras {
    /// Multiplies q, to make scores large.
    pub sharpness: Option<f64>,
    /// A bias tensor with these axes.
    pub bias: Option<Axes>,
    /// A relative table of this reach, for each head or one for all.
    pub table: Option<(usize, bool)>,
    /// A learned scale, for each head or one for all.
    pub scale: Option<bool>,
    /// Sinks.
    pub sinks: bool,
    /// Key lengths.
    pub lengths: bool,
    /// Segments.
    pub segments: bool,
    /// A mask of bits with these axes.
    pub bits: Option<Axes>,
    /// Given places.
    pub positions: bool,
    /// Upstream gradients for the log-sum-exp and the entropy.
    pub all_upstream: bool,
    /// Keys of the additive score are already projected.
    pub projected: bool,
    /// One matrix per head rather than one for all.
    pub matrix_per_head: bool,
    /// Hash buckets.
    pub lsh: Option<Lsh>,
}

/// A description with its data, in `f64`; an element type rounds it.
#[derive(Clone, Debug)]
pub struct Case {
    /// The name that a failure is reported with.
    pub name: String,
    /// The description.
    pub attention: Attention,
    /// The sizes.
    pub sizes: Sizes,
    /// The options besides the score.
    pub extras: Extras,
}

impl Case {
    /// A case of these parts. The settings that the extras imply are added to the description.
    pub fn new(name: impl Into<String>, attention: Attention, sizes: Sizes, extras: Extras) -> Case {
        let mut attention = attention;
        if extras.bias.is_some() {
            attention = attention.bias(Bias::tensor());
        }
        if let Some((reach, _)) = extras.table {
            attention = attention.bias(Bias::relative(reach));
        }
        if extras.scale.is_some() {
            attention = attention.learned_scale();
        }
        if extras.sinks {
            attention = attention.with_sinks();
        }
        if extras.positions {
            attention = attention.place(Place::Given);
        }
        for (asked, mask) in [
            (extras.lengths, Mask::lengths()),
            (extras.segments, Mask::segments()),
            (extras.bits.is_some(), Mask::bits()),
        ] {
            if asked {
                attention = attention.mask(mask);
            }
        }
        if let Some(lsh) = extras.lsh {
            attention = attention.mask(Mask::lsh(lsh));
        }
        // Linear attention computes no weights, so it has no entropy.
        let linear = matches!(attention.score, Score::Linear(_));
        if matches!(attention.select, Select::Soft | Select::Hard(_)) && !linear {
            attention = attention.with_entropy();
        }
        Case { name: name.into(), attention, sizes, extras }
    }

    /// Whether a bias shifts whole rows of scores by a constant: softmax is invariant to that, and its gradient is
    /// exactly 0.
    pub fn shifts_whole_rows(&self) -> bool {
        self.extras.bias.is_some_and(|axes| !axes[3]) || self.extras.table.is_some_and(|(reach, _)| reach == 0)
    }

    /// The data, rounded to `T`.
    pub fn data<T: Element>(&self) -> Data<T> {
        let Sizes { b, hq, hk, n, m, d, dk, dv } = self.sizes;
        let extras = &self.extras;
        let noise = |shape, seed| Tensor::<T, 4>::randn(shape, seed);
        let half = |x: &T| T::of_f64(x.to_f64() * 0.5);
        let axes = |axes: Axes| {
            let full = [b, hq, n, m];
            std::array::from_fn(|axis| if axes[axis] { full[axis] } else { 1 })
        };
        let vector = |len, seed| Tensor::<T, 1>::randn([len], seed).map(half).into_data();
        let of_rows = |seed| Tensor::<T::Acc, 1>::randn([b * hq * n], seed).into_data();
        let sharpness = extras.sharpness.unwrap_or(1.0);
        let score = self.attention.score;
        let a = if extras.projected { dk } else { 5 };
        let of_head = |heads: usize| if extras.matrix_per_head { heads } else { 1 };
        // Matrices preserve the magnitude of what they multiply, as every initialization does.
        let matrix = |shape: [usize; 4], width: usize, seed| {
            noise(shape, seed).map(|x| T::of_f64(x.to_f64() / (width.max(1) as f64).sqrt()))
        };
        Data {
            q: noise([b, hq, n, d], 1).map(|x| T::of_f64(x.to_f64() * sharpness)),
            k: noise([b, hk, m, dk], 2),
            v: noise([b, hk, m, dv], 3),
            d_out: noise([b, hq, n, dv], 4),
            w: (score == Score::General).then(|| matrix([1, of_head(hq), d, dk], d, 5)),
            w_q: (score == Score::Additive).then(|| matrix([1, of_head(hq), a, d], d, 6)),
            w_k: (score == Score::Additive && !extras.projected).then(|| matrix([1, of_head(hk), a, dk], dk, 7)),
            v_score: (score == Score::Additive).then(|| vector(a, 8)),
            bias: extras.bias.map(|given| noise(axes(given), 9)),
            table: extras
                .table
                .map(|(reach, per_head)| Tensor::randn([if per_head { hq } else { 1 }, 2 * reach + 1], 10)),
            scale: extras.scale.map(|per_head| vector(if per_head { hq } else { 1 }, 11)),
            sinks: extras.sinks.then(|| vector(hq, 12)),
            lengths: extras.lengths.then(|| (0..b).map(|b| (m + b * 7).saturating_sub(m / 3) % (m + 1)).collect()),
            segments: extras.segments.then(|| {
                let cut =
                    |len: usize| (0..b).flat_map(move |b| (0..len).map(move |i| (i / (3 + b) / 5) as i32)).collect();
                (cut(n), cut(m))
            }),
            bits: extras.bits.map(|given| {
                Tensor::from_fn(axes(given), |[b, h, i, j]| u8::from((b + 3 * h + 7 * i + 5 * j) % 4 != 0))
            }),
            positions: extras.positions.then(|| (0..b * n).map(|at| ((at * 7) % (m + 3)) as i64 - 1).collect()),
            d_lse: (extras.all_upstream && self.attention.select != Select::Sparsemax).then(|| of_rows(13)),
            d_entropy: (extras.all_upstream && self.attention.entropy).then(|| of_rows(14)),
            d_log_prob: (extras.all_upstream && matches!(self.attention.select, Select::Hard(_))).then(|| of_rows(15)),
            center: self.attention.local.map(|_| {
                // Anywhere among the keys and a little beyond, never on one.
                let spread = |x: &f64| T::of_f64((x * 0.3 + 0.5) * m as f64 + 0.37);
                Tensor::<f64, 1>::randn([b * hq * n], 16).map(spread).into_data()
            }),
            buckets: extras.lsh.map(|lsh| {
                let hash = |t: &Tensor<f64, 4>| lsh.hash(t).expect("a case is well formed");
                (hash(&Tensor::randn([b, hq, n, d], 1)), hash(&Tensor::randn([b, hk, m, dk], 2)))
            }),
        }
    }
}

/// The data of a case in one element type.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct Data<T: Element> {
    pub q: Tensor<T, 4>,
    pub k: Tensor<T, 4>,
    pub v: Tensor<T, 4>,
    pub d_out: Tensor<T, 4>,
    pub w: Option<Tensor<T, 4>>,
    pub w_q: Option<Tensor<T, 4>>,
    pub w_k: Option<Tensor<T, 4>>,
    pub v_score: Option<Vec<T>>,
    pub bias: Option<Tensor<T, 4>>,
    pub table: Option<Tensor<T, 2>>,
    pub scale: Option<Vec<T>>,
    pub sinks: Option<Vec<T>>,
    pub lengths: Option<Vec<usize>>,
    pub segments: Option<(Vec<i32>, Vec<i32>)>,
    pub bits: Option<Tensor<u8, 4>>,
    pub positions: Option<Vec<i64>>,
    pub d_lse: Option<Vec<T::Acc>>,
    pub d_entropy: Option<Vec<T::Acc>>,
    pub d_log_prob: Option<Vec<T::Acc>>,
    pub center: Option<Vec<T>>,
    pub buckets: Option<(Tensor<i32, 4>, Tensor<i32, 4>)>,
}

impl<T: Element> Data<T> {
    /// The same numbers in `f64`: the definition reads those, so that it is compiled for one type.
    pub fn wide(&self) -> Data<f64> {
        let number = |x: &T| x.to_f64();
        let tensor = |t: &Option<Tensor<T, 4>>| t.as_ref().map(|t| t.map(number));
        let numbers = |v: &Option<Vec<T>>| v.as_ref().map(|v| v.iter().map(number).collect());
        let sums =
            |v: &Option<Vec<T::Acc>>| v.as_ref().map(|v| v.iter().map(|&x| qkv_simd::Element::to_f64(x)).collect());
        Data {
            q: self.q.map(number),
            k: self.k.map(number),
            v: self.v.map(number),
            d_out: self.d_out.map(number),
            w: tensor(&self.w),
            w_q: tensor(&self.w_q),
            w_k: tensor(&self.w_k),
            v_score: numbers(&self.v_score),
            bias: tensor(&self.bias),
            table: self.table.as_ref().map(|table| table.map(number)),
            scale: numbers(&self.scale),
            sinks: numbers(&self.sinks),
            lengths: self.lengths.clone(),
            segments: self.segments.clone(),
            bits: self.bits.clone(),
            positions: self.positions.clone(),
            d_lse: sums(&self.d_lse),
            d_entropy: sums(&self.d_entropy),
            d_log_prob: sums(&self.d_log_prob),
            center: numbers(&self.center),
            buckets: self.buckets.clone(),
        }
    }

    /// As the inputs of a call.
    pub fn inputs(&self) -> Inputs<'_, T> {
        let mut inputs = Inputs::new(&self.q, &self.k, &self.v).seed(99);
        if let Some(w) = &self.w {
            inputs = inputs.w(w);
        }
        if let Some(w_q) = &self.w_q {
            inputs = inputs.w_q(w_q);
        }
        if let Some(w_k) = &self.w_k {
            inputs = inputs.w_k(w_k);
        }
        if let Some(v_score) = &self.v_score {
            inputs = inputs.v_score(v_score);
        }
        if let Some(bias) = &self.bias {
            inputs = inputs.bias(bias);
        }
        if let Some(table) = &self.table {
            inputs = inputs.table(table);
        }
        if let Some(scale) = &self.scale {
            inputs = inputs.scale(scale);
        }
        if let Some(sinks) = &self.sinks {
            inputs = inputs.sinks(sinks);
        }
        if let Some(lengths) = &self.lengths {
            inputs = inputs.lengths(lengths);
        }
        if let Some((queries, keys)) = &self.segments {
            inputs = inputs.segments(queries, keys);
        }
        if let Some(bits) = &self.bits {
            inputs = inputs.bits(bits);
        }
        if let Some(positions) = &self.positions {
            inputs = inputs.positions(positions);
        }
        if let Some(center) = &self.center {
            inputs = inputs.center(center);
        }
        if let Some((queries, keys)) = &self.buckets {
            inputs = inputs.buckets(queries, keys);
        }
        inputs
    }

    /// As the upstream gradients of a call.
    pub fn upstream(&self) -> Upstream<'_, T> {
        let mut upstream = Upstream::new(&self.d_out);
        if let Some(d_lse) = &self.d_lse {
            upstream = upstream.lse(d_lse);
        }
        if let Some(d_entropy) = &self.d_entropy {
            upstream = upstream.entropy(d_entropy);
        }
        if let Some(d_log_prob) = &self.d_log_prob {
            upstream = upstream.log_prob(d_log_prob);
        }
        upstream
    }
}
