//! [`Attention`]: the four choices in one description, and what can be asked of it.

use crate::bias::Bias;
use crate::decode::Decode;
use crate::element::Element;
use crate::error::Result;
use crate::exact;
use crate::feature::Features;
use crate::inputs::{Inputs, Upstream};
use crate::mask::Mask;
use crate::place::Place;
use crate::problem::Problem;
use crate::score::{Scale, Score};
use crate::scratch::Scratch;
use crate::select::{Choice, Dropout, Select};
use crate::tensor::Tensor;
use crate::weights::Weights;
use qkv_simd::{Element as _, ViewMut};
use serde::{Deserialize, Serialize};

/// What attention is to be computed: a plain description, without tensors and without a device. It can be cloned,
/// compared, written into a file and read back.
///
/// ```
/// use qkv::{Attention, Bias, Inputs, Mask, Tensor, Upstream};
/// let [q, k, v] = [1, 2, 3].map(|seed| Tensor::<f32, 4>::randn([1, 8, 256, 64], seed)); // [B, H, N, D]
///
/// let causal = Attention::scaled_dot().mask(Mask::causal() & Mask::window(128, 0)).bias(Bias::alibi());
/// let out = causal.forward(Inputs::new(&q, &k, &v))?;                                  // out.values, out.lse
/// let d_out = Tensor::<f32, 4>::randn([1, 8, 256, 64], 4);
/// let grad = causal.backward(Inputs::new(&q, &k, &v), &out, Upstream::new(&d_out))?;   // grad.q, grad.k, grad.v
/// let seen = causal.weights(Inputs::new(&q, &k, &v), &out)?.rows(0, 3, 40..48)?;       // exact, recomputed
/// assert_eq!(seen.shape(), [8, 256]);
/// # Ok::<(), qkv::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct Attention {
    /// How alike a query and a key are.
    pub score: Score,
    /// What scores are multiplied by.
    pub scale: Scale,
    /// What they are divided by afterwards.
    pub temperature: Option<f64>,
    /// The soft cap on scores.
    pub softcap: Option<f64>,
    /// What is added to scores.
    pub bias: Bias,
    /// Which keys a query may see.
    pub mask: Mask,
    /// Where the queries stand among the keys.
    pub place: Place,
    /// The half width of predictive local attention.
    pub local: Option<usize>,
    /// How scores become weights.
    pub select: Select,
    /// Attention dropout.
    pub dropout: Option<Dropout>,
    /// Whether every head has a sink.
    pub sinks: bool,
    /// Whether the forward pass returns the entropy of each row.
    pub entropy: bool,
}

impl Attention {
    /// Softmax attention with this score and nothing else.
    pub fn new(score: Score) -> Attention {
        Attention { score, ..Attention::default() }
    }

    /// `q·k`. See [`Score`].
    pub fn dot() -> Attention {
        Attention::new(Score::Dot)
    }

    /// `q·k / √d`, the Transformer's. See [`Score`].
    pub fn scaled_dot() -> Attention {
        Attention::new(Score::ScaledDot)
    }

    /// `qᵀ W k`, Luong's. See [`Score`].
    pub fn general() -> Attention {
        Attention::new(Score::General)
    }

    /// `vᵀ tanh(W₁q + W₂k)`, Bahdanau's. See [`Score`].
    pub fn additive() -> Attention {
        Attention::new(Score::Additive)
    }

    /// `q·k / (‖q‖ ‖k‖)`. See [`Score`].
    pub fn cosine() -> Attention {
        Attention::new(Score::Cosine)
    }

    /// `−‖q − k‖²`. See [`Score`].
    pub fn distance() -> Attention {
        Attention::new(Score::Distance)
    }

    /// Linear attention with these features. See [`Features`].
    pub fn linear(features: Features) -> Attention {
        Attention::new(Score::Linear(features))
    }

    /// Multiply scores by this instead of by the score's own scale.
    pub fn scale(mut self, scale: f64) -> Attention {
        self.scale = Scale::Fixed(scale);
        self
    }

    /// Multiply scores by the input `scale`, which then has a gradient. See [`Scale`].
    pub fn learned_scale(mut self) -> Attention {
        self.scale = Scale::Learned;
        self
    }

    /// Divide scores by this after the scale: above 1 the weights spread, below 1 they gather.
    ///
    /// ```
    /// # use qkv::*; let x = Tensor::<f32, 4>::randn([1, 1, 9, 4], 1);
    /// let entropy = |t: f64| {
    ///     let attention = Attention::scaled_dot().temperature(t).with_entropy();
    ///     Ok::<f32, qkv::Error>(attention.forward(Inputs::new(&x, &x, &x))?.entropy.unwrap()[[0, 0, 0]])
    /// };
    /// assert!(entropy(0.5)? < entropy(1.0)? && entropy(1.0)? < entropy(2.0)?);
    /// # Ok::<(), qkv::Error>(())
    /// ```
    pub fn temperature(mut self, temperature: f64) -> Attention {
        self.temperature = Some(temperature);
        self
    }

    /// Keep scores between −cap and cap, by `cap · tanh(score / cap)` (Gemma 2, arXiv:2408.00118).
    ///
    /// ```
    /// # use qkv::*; let x = Tensor::<f32, 4>::randn([1, 1, 9, 4], 1);
    /// Attention::scaled_dot().softcap(50.0).forward(Inputs::new(&x, &x, &x))?;
    /// # Ok::<(), qkv::Error>(())
    /// ```
    pub fn softcap(mut self, cap: f64) -> Attention {
        self.softcap = Some(cap);
        self
    }

    /// Add this bias to every score. Called twice, both are added.
    pub fn bias(mut self, bias: Bias) -> Attention {
        self.bias = self.bias + bias;
        self
    }

    /// Let each query see only these keys. Called twice, both must allow a pair.
    pub fn mask(mut self, mask: Mask) -> Attention {
        self.mask = self.mask & mask;
        self
    }

    /// Where the queries stand among the keys.
    pub fn place(mut self, place: Place) -> Attention {
        self.place = place;
        self
    }

    /// How scores become weights. See [`Select`].
    pub fn select(mut self, select: Select) -> Attention {
        self.select = select;
        self
    }

    /// Attend to the one key with the largest score (Xu et al. 2015, arXiv:1502.03044).
    pub fn hard(self) -> Attention {
        self.select(Select::Hard(Choice::default()))
    }

    /// Attend to one key, drawn from the softmax. The log-probability of the draw comes out, and takes an upstream gradient.
    ///
    /// ```
    /// use qkv::{Attention, Inputs, Tensor, Upstream};
    /// let x = Tensor::<f32, 4>::randn([1, 1, 9, 4], 1);
    /// let sampled = Attention::scaled_dot().sample(3);
    /// let out = sampled.forward(Inputs::new(&x, &x, &x))?;
    /// // REINFORCE: the gradient of reward · log-probability.
    /// let reward = [1.0; 9];
    /// let upstream = Upstream::new(&x).log_prob(&reward);
    /// let grad = sampled.backward(Inputs::new(&x, &x, &x), &out, upstream)?;
    /// assert!(grad.q.data().iter().any(|&g| g != 0.0));
    /// # Ok::<(), qkv::Error>(())
    /// ```
    pub fn sample(self, seed: u64) -> Attention {
        self.select(Select::Hard(Choice { sample: Some(seed), straight_through: false }))
    }

    /// Let hard attention's scores learn from the output as if the weights had been soft. See [`Choice`].
    pub fn straight_through(mut self) -> Attention {
        if let Select::Hard(choice) = &mut self.select {
            choice.straight_through = true;
        }
        self
    }

    /// Attend to the `k` keys with the largest scores.
    pub fn top_k(self, k: usize) -> Attention {
        self.select(Select::TopK(k))
    }

    /// Weigh keys by sparsemax.
    pub fn sparsemax(self) -> Attention {
        self.select(Select::Sparsemax)
    }

    /// Predictive local attention (local-p of Luong et al. 2015, arXiv:1508.04025): each query sees the keys within
    /// `half_width` of its predicted centre, the input `center [B, Hq, N]`, and its weights are multiplied by
    /// `exp(−(j − c)² / 2σ²)` with `σ = half_width / 2`, not normalised again. The centre has a gradient.
    ///
    /// Monotonic local attention (local-m) is [`Mask::window`](crate::Mask::window) around the query's own place.
    ///
    /// ```
    /// use qkv::{Attention, Inputs, Tensor, Upstream};
    /// let q = Tensor::<f32, 4>::randn([1, 1, 3, 4], 1);
    /// let k = Tensor::<f32, 4>::randn([1, 1, 30, 4], 2);
    /// let predictive = Attention::dot().local(4);
    /// let inputs = Inputs::new(&q, &k, &k).center(&[3.5, 14.0, 22.25]);
    /// let out = predictive.forward(inputs)?;
    /// let grad = predictive.backward(inputs, &out, Upstream::new(&q))?;
    /// assert_eq!(grad.center.unwrap().len(), 3);
    /// # Ok::<(), qkv::Error>(())
    /// ```
    pub fn local(mut self, half_width: usize) -> Attention {
        self.local = Some(half_width);
        self
    }

    /// Drop each weight with probability `p`, and scale up what is kept.
    ///
    /// ```
    /// # use qkv::*; let x = Tensor::<f32, 4>::randn([1, 1, 9, 4], 1);
    /// let training = Attention::scaled_dot().dropout(0.1, 42);
    /// let once = training.forward(Inputs::new(&x, &x, &x))?;
    /// assert_eq!(once, training.forward(Inputs::new(&x, &x, &x))?); // the same seed drops the same
    /// # Ok::<(), qkv::Error>(())
    /// ```
    pub fn dropout(mut self, p: f64, seed: u64) -> Attention {
        self.dropout = Some(Dropout { p, seed });
        self
    }

    /// Give every head a sink: a logit, from the input `sinks [Hq]`, that takes mass and gives no value (Xiao et al. 2023,
    /// arXiv:2309.17453). The log-sum-exp counts it, and the weights of a row sum to less than 1.
    ///
    /// ```
    /// # use qkv::*; let x = Tensor::<f32, 4>::randn([1, 2, 9, 4], 1);
    /// let sinking = Attention::scaled_dot().with_sinks();
    /// let inputs = Inputs::new(&x, &x, &x).sinks(&[0.0, 3.0]);
    /// let out = sinking.forward(inputs)?;
    /// let row = sinking.weights(inputs, &out)?.rows(0, 1, 0..1)?;
    /// assert!(row.data().iter().sum::<f32>() < 1.0);
    /// # Ok::<(), qkv::Error>(())
    /// ```
    pub fn with_sinks(mut self) -> Attention {
        self.sinks = true;
        self
    }

    /// Also return the entropy of each row of weights, `−Σ p ln p`, which takes a gradient in
    /// [`Upstream::entropy`](crate::Upstream::entropy): a penalty on it keeps attention from collapsing or spreading.
    pub fn with_entropy(mut self) -> Attention {
        self.entropy = true;
        self
    }

    /// Computes the attention, exactly and in linear memory, on the threads of the current rayon pool.
    pub fn forward<T: Element>(&self, inputs: Inputs<'_, T>) -> Result<Output<T>> {
        self.forward_with(inputs, &Scratch::new(), rayon::current_num_threads())
    }

    /// [`forward`](Attention::forward) with reusable scratch and a number of threads.
    pub fn forward_with<T: Element>(
        &self,
        inputs: Inputs<'_, T>,
        scratch: &Scratch<T::Acc>,
        threads: usize,
    ) -> Result<Output<T>> {
        let (problem, threads) = (Problem::new(self, inputs)?, threads.max(1));
        if self.select == Select::Soft {
            return Output::written(&problem, |into| T::forward(&problem, into, scratch, threads));
        }
        let mut out = Output::zeros(&problem)?;
        T::select(&problem, &mut out, scratch, threads)?;
        Ok(out)
    }

    /// [`forward`](Attention::forward) into memory of the caller's, with scratch that can be used again and a number of
    /// threads: nothing is allocated beyond what the scratch already holds, save a few words a block.
    ///
    /// ```
    /// # use qkv::*; let x = Tensor::<f32, 4>::randn([1, 2, 9, 4], 1);
    /// let attention = Attention::scaled_dot();
    /// let scratch = Scratch::new();
    /// let mut values = vec![0.0; 2 * 9 * 4];
    /// let mut lse = vec![0.0; 2 * 9];
    /// // Heads next to each other in memory: [B, N, H, D], as a layer after it may want them.
    /// let into = OutputMut {
    ///     values: ViewMut::strided(&mut values, 0, [1, 2, 9, 4], [72, 4, 8, 1])?,
    ///     lse: ViewMut::new(&mut lse, [1, 2, 9, 1])?,
    ///     entropy: None,
    /// };
    /// attention.forward_into(Inputs::new(&x, &x, &x), into, &scratch, 2)?;
    /// # Ok::<(), qkv::Error>(())
    /// ```
    pub fn forward_into<T: Element>(
        &self,
        inputs: Inputs<'_, T>,
        into: OutputMut<'_, T>,
        scratch: &Scratch<T::Acc>,
        threads: usize,
    ) -> Result<()> {
        let problem = Problem::new(self, inputs)?;
        into.check(&problem)?;
        self.check_into()?;
        T::forward(&problem, into, scratch, threads.max(1));
        Ok(())
    }

    /// Computes the gradients of everything that was given, from what [`forward`](Attention::forward) returned and what
    /// comes back from above: in one pass, in linear memory, the same bits for any number of threads.
    pub fn backward<T: Element>(
        &self,
        inputs: Inputs<'_, T>,
        out: &Output<T>,
        upstream: Upstream<'_, T>,
    ) -> Result<Gradients<T>> {
        self.backward_with(inputs, out, upstream, &Scratch::new(), rayon::current_num_threads())
    }

    /// [`backward`](Attention::backward) with scratch that can be used again and a number of threads.
    pub fn backward_with<T: Element>(
        &self,
        inputs: Inputs<'_, T>,
        out: &Output<T>,
        upstream: Upstream<'_, T>,
        scratch: &Scratch<T::Acc>,
        threads: usize,
    ) -> Result<Gradients<T>> {
        let problem = Problem::placed(self, inputs, out.place)?;
        out.check(&problem)?;
        problem.check_upstream(&upstream, out.entropy.is_some())?;
        out.check_kept(self)?;
        T::backward(&problem, out, &upstream, scratch, threads.max(1))
    }

    /// The weights, on demand: any rows, any rectangle, or pooled to a picture, recomputed exactly from `q`, `k` and what
    /// [`forward`](Attention::forward) kept.
    pub fn weights<'a, T: Element>(&'a self, inputs: Inputs<'a, T>, out: &'a Output<T>) -> Result<Weights<'a, T>> {
        let problem = Problem::placed(self, inputs, out.place)?;
        out.check(&problem)?;
        out.check_kept(self)?;
        Ok(Weights::new(problem, out))
    }

    /// Attends from a few new queries, which stand at the end, to a growing cache of keys and values.
    ///
    /// ```
    /// use qkv::{Attention, Cache, Decode, Inputs, Mask, Tensor};
    /// let causal = Attention::scaled_dot().mask(Mask::causal());
    /// let mut cache = Cache::<f32>::new(1, 2, 16, 16); // B, Hk, D, Dv
    /// for step in 0..5 {
    ///     let [q, k, v] = [1, 2, 3].map(|seed| Tensor::<f32, 4>::randn([1, 2, 1, 16], seed + 10 * step));
    ///     cache.append(&k, &v)?;
    ///     let out = causal.decode(Inputs::new(&q, cache.keys(), cache.values()), Decode::Fast)?;
    ///     assert_eq!(out.values.shape(), [1, 2, 1, 16]);
    /// }
    /// # Ok::<(), qkv::Error>(())
    /// ```
    pub fn decode<T: Element>(&self, inputs: Inputs<'_, T>, how: Decode) -> Result<Output<T>> {
        self.decode_with(inputs, how, &Scratch::new(), rayon::current_num_threads())
    }

    /// [`decode`](Attention::decode) with reusable scratch and a number of threads.
    pub fn decode_with<T: Element>(
        &self,
        inputs: Inputs<'_, T>,
        how: Decode,
        scratch: &Scratch<T::Acc>,
        threads: usize,
    ) -> Result<Output<T>> {
        let place = if inputs.positions.is_some() { Place::Given } else { Place::End };
        let (problem, threads) = (Problem::placed(self, inputs, place)?, threads.max(1));
        if self.select == Select::Soft {
            return Output::written(&problem, |into| T::decode(&problem, into, how, scratch, threads));
        }
        let mut out = Output::zeros(&problem)?;
        T::select(&problem, &mut out, scratch, threads)?;
        Ok(out)
    }

    /// [`decode`](Attention::decode) into memory of the caller's, with scratch that can be used again and a number of
    /// threads, as [`forward_into`](Attention::forward_into) is to [`forward`](Attention::forward).
    ///
    /// ```
    /// # use qkv::*;
    /// let q = Tensor::<f32, 4>::randn([1, 8, 1, 16], 1);
    /// let [k, v] = [2, 3].map(|seed| Tensor::<f32, 4>::randn([1, 2, 300, 16], seed));
    /// let (mut values, mut lse) = (vec![0.0; 8 * 16], vec![0.0; 8]);
    /// let into = OutputMut {
    ///     values: ViewMut::new(&mut values, [1, 8, 1, 16])?,
    ///     lse: ViewMut::new(&mut lse, [1, 8, 1, 1])?,
    ///     entropy: None,
    /// };
    /// let scratch = Scratch::new(); // kept from token to token
    /// Attention::scaled_dot().decode_into(Inputs::new(&q, &k, &v), into, Decode::Fast, &scratch, 2)?;
    /// # Ok::<(), qkv::Error>(())
    /// ```
    pub fn decode_into<T: Element>(
        &self,
        inputs: Inputs<'_, T>,
        into: OutputMut<'_, T>,
        how: Decode,
        scratch: &Scratch<T::Acc>,
        threads: usize,
    ) -> Result<()> {
        let place = if inputs.positions.is_some() { Place::Given } else { Place::End };
        let problem = Problem::placed(self, inputs, place)?;
        into.check(&problem)?;
        self.check_into()?;
        T::decode(&problem, into, how, scratch, threads.max(1));
        Ok(())
    }

    /// Refuses what returns more than memory of the caller's has room for.
    fn check_into(&self) -> Result<()> {
        if self.select == Select::Soft {
            return Ok(());
        }
        Err(crate::Error::Conflict {
            first: "output memory of the caller's",
            second: "a selection other than softmax",
            reason: "it returns more than values; use the call that allocates",
        })
    }

    /// How many tiles of each kind the mask leaves, in all sequences and heads: what the engine will touch. Linear attention
    /// touches none.
    ///
    /// ```
    /// # use qkv::*; let x = Tensor::<f32, 4>::randn([1, 1, 4096, 8], 1);
    /// let tiles = Attention::scaled_dot().mask(Mask::window(64, 0)).tiles(Inputs::new(&x, &x, &x))?;
    /// assert!(tiles.empty > 9 * (tiles.partial + tiles.full));
    /// # Ok::<(), qkv::Error>(())
    /// ```
    pub fn tiles<T: Element>(&self, inputs: Inputs<'_, T>) -> Result<Tiles> {
        let problem = Problem::new(self, inputs)?;
        Ok(if let Score::Linear(_) = self.score { Tiles::default() } else { exact::tiles(&problem) })
    }
}

/// How many tiles a mask leaves empty, partly kept and full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tiles {
    /// Never touched.
    pub empty: usize,
    /// Masked bit by bit.
    pub partial: usize,
    /// Without a mask.
    pub full: usize,
}

/// What the forward pass returns, and what backward needs of it. Two are equal if all that they return is.
#[derive(Clone, Debug)]
pub struct Output<T: qkv_simd::Element> {
    /// The weighted sums of the values, `[B, Hq, N, Dv]`.
    pub values: Tensor<T, 4>,
    /// The natural log of the sum of exponentials of each row of scores, `[B, Hq, N]`; −∞ where a query sees nothing. For
    /// top-k over what was chosen; for sparsemax the threshold `τ` instead.
    pub lse: Tensor<T::Acc, 3>,
    /// The entropy of each row of weights, `[B, Hq, N]`, where it was asked for.
    pub entropy: Option<Tensor<T::Acc, 3>>,
    /// The keys that hard attention or top-k chose, ascending, `[B, Hq, N, 1 or k]`; −1 where there was none to choose.
    pub chosen: Option<Tensor<i64, 4>>,
    /// The log-probability of what hard attention chose, `[B, Hq, N]`; 0 where there was nothing to choose.
    pub log_prob: Option<Tensor<T::Acc, 3>>,
    /// What backward needs besides, `[B, Hq, N, Dv]`: the soft output for straight-through, the mean of the values that
    /// sparsemax keeps.
    pub(crate) kept: Option<Tensor<T::Acc, 4>>,
    /// Where the queries stood.
    pub(crate) place: Place,
}

impl<T: qkv_simd::Element> PartialEq for Output<T> {
    fn eq(&self, other: &Self) -> bool {
        (&self.values, &self.lse, &self.entropy) == (&other.values, &other.lse, &other.entropy)
            && (&self.chosen, &self.log_prob, &self.kept) == (&other.chosen, &other.log_prob, &other.kept)
    }
}

impl<T: qkv_simd::Element> Output<T> {
    /// What a softmax leaves behind, from a file, say: its log-sum-exp `[B, Hq, N]` is all that the weights need. Values are
    /// as wide as `dv` says, and 0.
    ///
    /// ```
    /// use qkv::{Attention, Inputs, Output, Place, Tensor};
    /// let x = Tensor::<f32, 4>::randn([1, 1, 5, 8], 1);
    /// let nothing = Tensor::new(vec![], [1, 1, 5, 0])?; // no values: only the weights are wanted
    /// let attention = Attention::scaled_dot();
    /// let lse = attention.forward(Inputs::new(&x, &x, &x))?.lse;
    /// let out = Output::of_lse(lse, 0, Place::Start)?;
    /// let row = attention.weights(Inputs::new(&x, &x, &nothing), &out)?.rows(0, 0, 2..3)?;
    /// assert!((row.data().iter().sum::<f32>() - 1.0).abs() < 1e-6);
    /// # Ok::<(), qkv::Error>(())
    /// ```
    ///
    /// # Errors
    /// Where there is no memory for the values.
    pub fn of_lse(lse: Tensor<T::Acc, 3>, dv: usize, place: Place) -> Result<Self> {
        let [b, h, n] = lse.shape();
        let values = Tensor::zeros("out", [b, h, n, dv])?;
        Ok(Output { values, lse, entropy: None, chosen: None, log_prob: None, kept: None, place })
    }

    /// Every number rounded to another type.
    pub fn rounded<U: qkv_simd::Element>(&self) -> Output<U> {
        let column = |t: &Tensor<T::Acc, 3>| t.map(|x| U::Acc::of_f64(x.to_f64()));
        Output {
            values: self.values.rounded(),
            lse: column(&self.lse),
            entropy: self.entropy.as_ref().map(column),
            chosen: self.chosen.clone(),
            log_prob: self.log_prob.as_ref().map(column),
            kept: self.kept.as_ref().map(Tensor::rounded),
            place: self.place,
        }
    }

    pub(crate) fn zeros(problem: &Problem<'_, T>) -> Result<Self> {
        let Problem { b, n, dv, heads, .. } = *problem;
        Ok(Output { values: Tensor::zeros("out", [b, heads.query, n, dv])?, ..Output::but_values(problem)? })
    }

    /// All but the values, as zeros.
    fn but_values(problem: &Problem<'_, T>) -> Result<Self> {
        let Problem { b, n, heads, .. } = *problem;
        let rows = [b, heads.query, n];
        Ok(Output {
            values: Tensor::zeros("out", [0; 4])?,
            lse: Tensor::zeros("lse", rows)?,
            entropy: problem.attention.entropy.then(|| Tensor::zeros("entropy", rows)).transpose()?,
            chosen: None,
            log_prob: None,
            kept: None,
            place: problem.scene.place,
        })
    }

    /// What `write` makes of it: every row of values has to be written.
    pub(crate) fn written(problem: &Problem<'_, T>, write: impl FnOnce(OutputMut<'_, T>)) -> Result<Self> {
        let Problem { b, n, dv, heads, .. } = *problem;
        let mut out = Output::but_values(problem)?;
        let mut values = Tensor::unwritten("out", [b, heads.query, n, dv])?;
        write(OutputMut { values: values.view(), ..out.writable() });
        out.values = Tensor::new(values.written(), [b, heads.query, n, dv])?;
        Ok(out)
    }

    pub(crate) fn writable(&mut self) -> OutputMut<'_, T> {
        let [b, h, n] = self.lse.shape();
        let column = |tensor| ViewMut::new(Tensor::data_mut(tensor), [b, h, n, 1]).expect("one number a row");
        OutputMut {
            values: ViewMut::from(&mut self.values),
            lse: column(&mut self.lse),
            entropy: self.entropy.as_mut().map(column),
        }
    }

    /// Checks that this came out of the same problem.
    fn check(&self, problem: &Problem<'_, T>) -> Result<()> {
        let Problem { b, n, dv, heads, .. } = *problem;
        check_shape("out", self.values.shape(), [b, heads.query, n, dv])?;
        check_shape("lse", self.lse.shape(), [b, heads.query, n])?;
        self.entropy.as_ref().map_or(Ok(()), |e| check_shape("entropy", e.shape(), [b, heads.query, n]))
    }
}

impl<T: qkv_simd::Element> Output<T> {
    /// Checks that what a selection keeps for backward is there.
    fn check_kept(&self, attention: &Attention) -> Result<()> {
        let needs = |there: bool, tensor| match there {
            true => Ok(()),
            false => {
                Err(crate::Error::Missing { tensor, needed_by: "this selection (an output of another attention?)" })
            }
        };
        match attention.select {
            Select::Soft => Ok(()),
            Select::Hard(choice) => {
                needs(self.chosen.is_some(), "chosen")?;
                needs(!choice.straight_through || self.kept.is_some(), "the soft output")
            }
            Select::TopK(_) => needs(self.chosen.is_some(), "chosen"),
            Select::Sparsemax => needs(self.kept.is_some(), "the mean of the values"),
        }
    }
}

fn check_shape<const R: usize>(tensor: &'static str, found: [usize; R], expected: [usize; R]) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(crate::error::Error::shape(tensor, &found, format!("{expected:?}")))
}

/// Memory of the caller's for what the forward pass returns.
#[derive(Debug)]
pub struct OutputMut<'a, T: qkv_simd::Element> {
    /// `[B, Hq, N, Dv]`.
    pub values: ViewMut<'a, T>,
    /// `[B, Hq, N, 1]`.
    pub lse: ViewMut<'a, T::Acc>,
    /// `[B, Hq, N, 1]`, if the attention has [`with_entropy`](Attention::with_entropy).
    pub entropy: Option<ViewMut<'a, T::Acc>>,
}

impl<T: qkv_simd::Element> OutputMut<'_, T> {
    fn check(&self, problem: &Problem<'_, T>) -> Result<()> {
        let Problem { b, n, dv, heads, .. } = *problem;
        check_shape("out", self.values.shape(), [b, heads.query, n, dv])?;
        check_shape("lse", self.lse.shape(), [b, heads.query, n, 1])?;
        match (&self.entropy, problem.attention.entropy) {
            (Some(entropy), true) => check_shape("entropy", entropy.shape(), [b, heads.query, n, 1]),
            (None, false) => Ok(()),
            (None, true) => Err(crate::Error::Missing { tensor: "entropy", needed_by: "an attention with entropy" }),
            (Some(_), false) => {
                Err(crate::Error::Unused { tensor: "entropy", reason: "the attention was not asked for its entropy" })
            }
        }
    }
}

/// The gradients of everything that was given, each with the shape of what it is the gradient of.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients<T> {
    /// Of the queries, `[B, Hq, N, D]`.
    pub q: Tensor<T, 4>,
    /// Of the keys, `[B, Hk, M, Dk]`.
    pub k: Tensor<T, 4>,
    /// Of the values, `[B, Hk, M, Dv]`.
    pub v: Tensor<T, 4>,
    /// Of the general score's matrix, `[1, 1 or Hq, D, Dk]`.
    pub w: Option<Tensor<T, 4>>,
    /// Of the additive score's query matrix, `[1, 1 or Hq, A, D]`.
    pub w_q: Option<Tensor<T, 4>>,
    /// Of the additive score's key matrix, `[1, 1 or Hk, A, Dk]`.
    pub w_k: Option<Tensor<T, 4>>,
    /// Of the additive score's vector, `[A]`.
    pub v_score: Option<Vec<T>>,
    /// Of the learned scale, `[1 or Hq]`.
    pub scale: Option<Vec<T>>,
    /// Of the bias tensor, in the shape in which it was given.
    pub bias: Option<Tensor<T, 4>>,
    /// Of the relative table, `[1, 1, 1 or Hq, 2·reach + 1]`.
    pub table: Option<Tensor<T, 4>>,
    /// Of the sinks, `[Hq]`.
    pub sinks: Option<Vec<T>>,
    /// Of the predicted centres, `[B, Hq, N]`.
    pub center: Option<Vec<T>>,
}

impl<T: qkv_simd::Element> Gradients<T> {
    /// Every number rounded to another type.
    pub fn rounded<U: qkv_simd::Element>(&self) -> Gradients<U> {
        let tensor = |given: &Option<Tensor<T, 4>>| given.as_ref().map(Tensor::rounded);
        let numbers =
            |given: &Option<Vec<T>>| given.as_ref().map(|given| given.iter().map(|x| U::of_f64(x.to_f64())).collect());
        Gradients {
            q: self.q.rounded(),
            k: self.k.rounded(),
            v: self.v.rounded(),
            w: tensor(&self.w),
            w_q: tensor(&self.w_q),
            w_k: tensor(&self.w_k),
            v_score: numbers(&self.v_score),
            scale: numbers(&self.scale),
            bias: tensor(&self.bias),
            table: tensor(&self.table),
            sinks: numbers(&self.sinks),
            center: numbers(&self.center),
        }
    }
}
