//! [`Attention`]: the description of an attention, its builders, and the calls that compute it.

use crate::bias::Bias;
use crate::decode::Decode;
use crate::element::Element;
use crate::error::Result;
use crate::exact;
use crate::feature::Features;
use crate::gradients::{Gradients, GradientsMut};
use crate::inputs::{Inputs, Upstream};
use crate::mask::Mask;
use crate::output::{Output, OutputMut, OutputRef};
use crate::place::Place;
use crate::problem::Problem;
use crate::score::{Scale, Score};
use crate::scratch::Scratch;
use crate::select::{Choice, Dropout, Select};
use crate::tensor::Tensor;
use crate::weights::Weights;
use serde::{Deserialize, Serialize};

/// The description of an attention: plain data, without tensors and without a device. It can be cloned, compared,
/// written to a file and read back.
///
/// Builders never fail. A description that contradicts itself (`straight_through` before `hard`, two relative tables)
/// is refused with a typed [`Error`](crate::Error) by the first call that uses it.
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
    /// Set by [`straight_through`](Attention::straight_through) on an attention that is not hard: an error at first
    /// use.
    #[serde(skip)]
    pub(crate) misplaced_straight_through: bool,
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

    /// Attend to one key, drawn from the softmax with the seed of the call, [`Inputs::seed`](crate::Inputs::seed). The
    /// output holds the log-probability of the draw, which takes an upstream gradient.
    ///
    /// ```
    /// use qkv::{Attention, Inputs, Tensor, Upstream};
    /// let x = Tensor::<f32, 4>::randn([1, 1, 9, 4], 1);
    /// let sampled = Attention::scaled_dot().sample();
    /// let inputs = Inputs::new(&x, &x, &x).seed(3);
    /// let out = sampled.forward(inputs)?;
    /// // REINFORCE: the gradient of reward · log-probability.
    /// let reward = [1.0; 9];
    /// let grad = sampled.backward(inputs, &out, Upstream::new(&x).log_prob(&reward))?;
    /// assert!(grad.q.data().iter().any(|&g| g != 0.0));
    /// # Ok::<(), qkv::Error>(())
    /// ```
    pub fn sample(self) -> Attention {
        self.select(Select::Hard(Choice { sample: true, straight_through: false }))
    }

    /// Pass the gradient of a hard attention's output to the scores as if the weights had been soft. Comes after
    /// [`hard`](Attention::hard) or [`sample`](Attention::sample); elsewhere it is an error at first use. See
    /// [`Choice`].
    ///
    /// ```
    /// # use qkv::*; let x = Tensor::<f32, 4>::randn([1, 1, 9, 4], 1);
    /// assert!(Attention::dot().hard().straight_through().forward(Inputs::new(&x, &x, &x)).is_ok());
    /// assert!(Attention::dot().straight_through().hard().forward(Inputs::new(&x, &x, &x)).is_err());
    /// # Ok::<(), qkv::Error>(())
    /// ```
    pub fn straight_through(mut self) -> Attention {
        match &mut self.select {
            Select::Hard(choice) => choice.straight_through = true,
            _ => self.misplaced_straight_through = true,
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

    /// Drop each weight with probability `p` and scale up the others. What is dropped depends on the seed of the call,
    /// [`Inputs::seed`](crate::Inputs::seed). To evaluate, use [`for_evaluation`](Attention::for_evaluation).
    ///
    /// ```
    /// # use qkv::*; let x = Tensor::<f32, 4>::randn([1, 1, 9, 4], 1);
    /// let training = Attention::scaled_dot().dropout(0.1);
    /// for step in 0..3 {
    ///     training.forward(Inputs::new(&x, &x, &x).seed(step))?;
    /// }
    /// # Ok::<(), qkv::Error>(())
    /// ```
    pub fn dropout(mut self, p: f64) -> Attention {
        self.dropout = Some(Dropout { p });
        self
    }

    /// The same attention without randomness: no dropout, and the most likely key instead of a sampled one. It takes no
    /// seed.
    ///
    /// ```
    /// # use qkv::*;
    /// let training = Attention::scaled_dot().dropout(0.1);
    /// assert_eq!(training.for_evaluation(), Attention::scaled_dot());
    /// ```
    pub fn for_evaluation(mut self) -> Attention {
        self.dropout = None;
        if let Select::Hard(choice) = &mut self.select {
            choice.sample = false;
        }
        self
    }

    /// Whether a call draws random numbers, and so needs [`Inputs::seed`](crate::Inputs::seed).
    pub fn draws(&self) -> bool {
        self.dropout.is_some_and(|dropout| dropout.threshold() > 0)
            || matches!(self.select, Select::Hard(Choice { sample: true, .. }))
    }

    /// Give every head a sink: a logit, from the input `sinks [Hq]`, that takes mass and gives no value (Xiao et al.
    /// 2023, arXiv:2309.17453). The log-sum-exp counts it, and the weights of a row sum to less than 1.
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
    /// let values = ViewMut::strided(&mut values, 0, [1, 2, 9, 4], [72, 4, 8, 1])?;
    /// let into = OutputMut::new(values, ViewMut::new(&mut lse, [1, 2, 9, 1])?);
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
        let (problem, threads) = (Problem::placed(self, inputs, out.place)?, threads.max(1));
        out.check(&problem)?;
        problem.check_upstream(&upstream, out.entropy.is_some())?;
        out.check_saved(self)?;
        let shapes = [("d_q", inputs.q.shape()), ("d_k", inputs.k.shape()), ("d_v", inputs.v.shape())];
        if let Score::Linear(_) = self.score {
            let [q, k, v] = shapes.map(|(name, shape)| Tensor::allocate(name, shape));
            let mut gradients = Gradients::new(q?, k?, v?);
            T::backward(&problem, out.as_ref(), &upstream, gradients.as_mut(), scratch, threads);
            return Ok(gradients);
        }
        // Every row is written, so the memory is not cleared first.
        let [d_q, d_k, d_v] = shapes.map(|(name, shape)| Tensor::unwritten(name, shape));
        let (mut d_q, mut d_k, mut d_v) = (d_q?, d_k?, d_v?);
        let empty = || Tensor::allocate("gradient", [0; 4]);
        let mut gradients = Gradients::allocate([empty()?, empty()?, empty()?], &inputs, &upstream)?;
        let into = GradientsMut { q: d_q.view(), k: d_k.view(), v: d_v.view(), ..gradients.as_mut() };
        T::backward(&problem, out.as_ref(), &upstream, into, scratch, threads);
        let [q, k, v] = shapes.map(|(_, shape)| shape);
        gradients.q = Tensor::new(d_q.written(), q)?;
        gradients.k = Tensor::new(d_k.written(), k)?;
        gradients.v = Tensor::new(d_v.written(), v)?;
        Ok(gradients)
    }

    /// [`backward`](Attention::backward) of a softmax from and into memory of the caller, with any strides: the output
    /// of
    /// [`forward_into`](Attention::forward_into) is read and the gradients are written in place, without copies. The
    /// bits
    /// are those of [`backward`](Attention::backward).
    ///
    /// ```
    /// use qkv::{Attention, GradientsMut, Inputs, OutputRef, Scratch, Tensor, Upstream, ViewMut};
    /// let [q, k, v, d_out] = [1, 2, 3, 4].map(|seed| Tensor::<f32, 4>::randn([1, 2, 9, 4], seed));
    /// let attention = Attention::scaled_dot();
    /// let inputs = Inputs::new(&q, &k, &v);
    /// let out = attention.forward(inputs)?;
    /// let [mut d_q, mut d_k, mut d_v] = [(); 3].map(|()| vec![0.0f32; 2 * 9 * 4]);
    /// // Heads side by side in memory, [B, N, H, D], as the layer before wrote them.
    /// let side_by_side = |data| ViewMut::strided(data, 0, [1, 2, 9, 4], [72, 4, 8, 1]);
    /// let into = GradientsMut::new(side_by_side(&mut d_q)?, side_by_side(&mut d_k)?, side_by_side(&mut d_v)?);
    /// let saved = OutputRef::new(&out.values, out.lse.data());
    /// attention.backward_into(inputs, saved, Upstream::new(&d_out), into, &Scratch::new(), 2)?;
    /// let expected = attention.backward(inputs, &out, Upstream::new(&d_out))?;
    /// assert_eq!(d_q[8 + 4], expected.q[[0, 1, 1, 0]]); // query 1 of head 1
    /// # Ok::<(), qkv::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`backward`](Attention::backward), and for a selection other than softmax, whose output holds more than
    /// values.
    pub fn backward_into<T: Element>(
        &self,
        inputs: Inputs<'_, T>,
        out: OutputRef<'_, T>,
        upstream: Upstream<'_, T>,
        into: GradientsMut<'_, T>,
        scratch: &Scratch<T::Acc>,
        threads: usize,
    ) -> Result<()> {
        let problem = Problem::placed(self, inputs, out.place.unwrap_or(self.place))?;
        self.check_into()?;
        out.check(&problem)?;
        problem.check_upstream(&upstream, out.entropy.is_some())?;
        into.check(&inputs)?;
        T::backward(&problem, out, &upstream, into, scratch, threads.max(1));
        Ok(())
    }

    /// The weights, on demand: any rows, any rectangle, or pooled to a picture, recomputed exactly from `q`, `k` and
    /// what
    /// [`forward`](Attention::forward) kept.
    pub fn weights<'a, T: Element>(&'a self, inputs: Inputs<'a, T>, out: &'a Output<T>) -> Result<Weights<'a, T>> {
        let problem = Problem::placed(self, inputs, out.place)?;
        out.check(&problem)?;
        out.check_saved(self)?;
        Ok(Weights::new(problem, out.as_ref()))
    }

    /// Attends from a few new queries to a growing cache of keys and values. The queries stand at the end of the keys,
    /// or where [`Inputs::positions`](crate::Inputs::positions) puts them; a description with another [`Place`] is an
    /// error.
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
        let (problem, threads) = (Problem::decoding(self, inputs)?, threads.max(1));
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
    /// let into = OutputMut::new(ViewMut::new(&mut values, [1, 8, 1, 16])?, ViewMut::new(&mut lse, [1, 8, 1, 1])?);
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
        let problem = Problem::decoding(self, inputs)?;
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

    /// How many tiles of each kind the mask leaves, in all sequences and heads: what the engine will touch. Linear
    /// attention touches none.
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
