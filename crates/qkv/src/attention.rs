//! [`Attention`]: the description of an attention and its builders. The calls on it are in [`calls`].

mod calls;

use crate::bias::Bias;
use crate::features::Features;
use crate::mask::Mask;
use crate::place::Place;
use crate::score::{Scale, Score};
use crate::select::{Choice, Dropout, Select};
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
    /// The similarity of a query and a key.
    pub score: Score,
    /// The factor that scores are multiplied by.
    pub scale: Scale,
    /// The temperature that scores are divided by after the scale.
    pub temperature: Option<f64>,
    /// The soft cap on scores.
    pub softcap: Option<f64>,
    /// The bias that is added to scores.
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

    /// Divide scores by this after the scale: above 1 the weights spread, below 1 they concentrate.
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
    /// `half_width` of its predicted center, the input `center [B, Hq, N]`, and its weights are multiplied by
    /// `exp(−(j − c)² / 2σ²)` with `σ = half_width / 2`, without normalizing them again. The center has a gradient.
    ///
    /// Monotonic local attention (local-m) is [`Mask::window`](crate::Mask::window) around the query's own position.
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

    /// Drop each weight with probability `p` and scale up the others. Which weights are dropped depends on the seed of
    /// the call, [`Inputs::seed`](crate::Inputs::seed). To evaluate, use [`for_evaluation`](Attention::for_evaluation).
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

    /// Give every head a sink: a logit, from the input `sinks [Hq]`, that takes probability mass and has no value (Xiao
    /// et al. 2023, arXiv:2309.17453). The log-sum-exp counts it, and the weights of a row sum to less than 1.
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
