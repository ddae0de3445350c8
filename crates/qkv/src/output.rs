//! [`Output`]: what the forward pass returns and the backward pass reads. [`OutputMut`]: the caller's memory for it.

use crate::attention::Attention;
use crate::error::{Error, Result};
use crate::place::Place;
use crate::problem::Problem;
use crate::select::Select;
use crate::tensor::Tensor;
use qkv_simd::{Element, View, ViewMut};

/// What the forward pass returns, including what the backward pass needs. Two outputs are equal if all returned numbers
/// are.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Output<T: Element> {
    /// The weighted sums of the values, `[B, Hq, N, Dv]`.
    pub values: Tensor<T, 4>,
    /// The natural log of the sum of exponentials of each row of scores, `[B, Hq, N]`; −∞ where a query sees no key.
    /// For top-k it covers the chosen keys. Empty for sparsemax, which has a [`threshold`](Output::threshold).
    pub lse: Tensor<T::Acc, 3>,
    /// The threshold τ of each row of sparsemax, `[B, Hq, N]`; −∞ where a query sees no key.
    pub threshold: Option<Tensor<T::Acc, 3>>,
    /// The entropy of each row of weights, `[B, Hq, N]`, if the attention has
    /// [`with_entropy`](Attention::with_entropy).
    pub entropy: Option<Tensor<T::Acc, 3>>,
    /// The keys that hard attention or top-k chose, ascending, `[B, Hq, N, 1 or k]`; −1 fills the front of a row that
    /// sees fewer keys.
    pub chosen: Option<Tensor<i64, 4>>,
    /// The log-probability of hard attention's choice, `[B, Hq, N]`; 0 where a query sees no key.
    pub log_prob: Option<Tensor<T::Acc, 3>>,
    /// Saved for backward, `[B, Hq, N, Dv]`: the soft output for straight-through, the mean of the supported values for
    /// sparsemax.
    pub(crate) saved: Option<Tensor<T::Acc, 4>>,
    /// The place of the queries in this call.
    pub(crate) place: Place,
    /// The seed of this call, if it drew anything and the output came from this crate.
    pub(crate) seed: Option<u64>,
}

impl<T: Element> PartialEq for Output<T> {
    fn eq(&self, other: &Self) -> bool {
        (&self.values, &self.lse, &self.threshold, &self.entropy)
            == (&other.values, &other.lse, &other.threshold, &other.entropy)
            && (&self.chosen, &self.log_prob, &self.saved) == (&other.chosen, &other.log_prob, &other.saved)
    }
}

impl<T: Element> Output<T> {
    pub(crate) fn new(values: Tensor<T, 4>, lse: Tensor<T::Acc, 3>, place: Place) -> Self {
        let (threshold, entropy, chosen, log_prob, saved) = (None, None, None, None, None);
        Output { values, lse, threshold, entropy, chosen, log_prob, saved, place, seed: None }
    }

    /// The output of a softmax whose log-sum-exp `[B, Hq, N]` is known, from a file for example: all that the weights
    /// need. The values have width `dv` and are 0.
    ///
    /// ```
    /// use qkv::{Attention, Inputs, Output, Place, Tensor};
    /// let x = Tensor::<f32, 4>::randn([1, 1, 5, 8], 1);
    /// let no_values = Tensor::new(vec![], [1, 1, 5, 0])?;
    /// let attention = Attention::scaled_dot();
    /// let lse = attention.forward(Inputs::new(&x, &x, &x))?.lse;
    /// let out = Output::of_lse(lse, 0, Place::Start)?;
    /// let row = attention.weights(Inputs::new(&x, &x, &no_values), &out)?.rows(0, 0, 2..3)?;
    /// assert!((row.data().iter().sum::<f32>() - 1.0).abs() < 1e-6);
    /// # Ok::<(), qkv::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the values do not fit into memory.
    pub fn of_lse(lse: Tensor<T::Acc, 3>, dv: usize, place: Place) -> Result<Self> {
        let [b, h, n] = lse.shape();
        Ok(Output::new(Tensor::allocate("out", [b, h, n, dv])?, lse, place))
    }

    /// Every number rounded to another type.
    pub fn rounded<U: Element>(&self) -> Output<U> {
        let column = |t: &Tensor<T::Acc, 3>| t.map(|x| U::Acc::of_f64(x.to_f64()));
        Output {
            values: self.values.rounded(),
            lse: column(&self.lse),
            threshold: self.threshold.as_ref().map(column),
            entropy: self.entropy.as_ref().map(column),
            chosen: self.chosen.clone(),
            log_prob: self.log_prob.as_ref().map(column),
            saved: self.saved.as_ref().map(Tensor::rounded),
            place: self.place,
            seed: self.seed,
        }
    }

    /// The number of each row that its weights are recomputed from, `[B, Hq, N]`: the log-sum-exp, or sparsemax's
    /// threshold.
    pub(crate) fn row_statistic(&self) -> &Tensor<T::Acc, 3> {
        self.threshold.as_ref().unwrap_or(&self.lse)
    }

    /// The same, borrowed, as the backward pass reads it.
    pub fn as_ref(&self) -> OutputRef<'_, T> {
        OutputRef {
            values: View::from(&self.values),
            row_statistic: self.row_statistic().data(),
            entropy: self.entropy.as_ref().map(Tensor::data),
            chosen: self.chosen.as_ref(),
            saved: self.saved.as_ref(),
            place: Some(self.place),
        }
    }

    pub(crate) fn zeros(problem: &Problem<'_, T>) -> Result<Self> {
        let Problem { b, n, dv, heads, .. } = *problem;
        Ok(Output { values: Tensor::allocate("out", [b, heads.query, n, dv])?, ..Output::without_values(problem)? })
    }

    /// Zeros for everything except the values.
    fn without_values(problem: &Problem<'_, T>) -> Result<Self> {
        let Problem { b, n, heads, .. } = *problem;
        let rows = [b, heads.query, n];
        let sparsemax = problem.attention.select == Select::Sparsemax;
        let lse = Tensor::allocate("lse", if sparsemax { [0; 3] } else { rows })?;
        Ok(Output {
            threshold: sparsemax.then(|| Tensor::allocate("threshold", rows)).transpose()?,
            entropy: problem.attention.entropy.then(|| Tensor::allocate("entropy", rows)).transpose()?,
            seed: problem.inputs.seed.filter(|_| problem.attention.draws()),
            ..Output::new(Tensor::allocate("out", [0; 4])?, lse, problem.mask_data.place)
        })
    }

    /// The output that `write` produces; it must write every row of the values.
    pub(crate) fn written(problem: &Problem<'_, T>, write: impl FnOnce(OutputMut<'_, T>)) -> Result<Self> {
        let Problem { b, n, dv, heads, .. } = *problem;
        let mut out = Output::without_values(problem)?;
        let mut values = Tensor::unwritten("out", [b, heads.query, n, dv])?;
        write(OutputMut { values: values.view(), ..out.as_mut() });
        out.values = Tensor::new(values.written(), [b, heads.query, n, dv])?;
        Ok(out)
    }

    /// The memory of a softmax's output, for a call of [`Attention::forward_into`].
    pub fn as_mut(&mut self) -> OutputMut<'_, T> {
        let [b, h, n] = self.lse.shape();
        let column = |tensor| ViewMut::new(Tensor::data_mut(tensor), [b, h, n, 1]).expect("one number per row");
        OutputMut {
            values: ViewMut::from(&mut self.values),
            lse: column(&mut self.lse),
            entropy: self.entropy.as_mut().map(column),
        }
    }

    /// Checks that this is the output of the same call.
    pub(crate) fn check(&self, problem: &Problem<'_, T>) -> Result<()> {
        let Problem { b, n, dv, heads, .. } = *problem;
        let rows = [b, heads.query, n];
        check_shape("out", self.values.shape(), [b, heads.query, n, dv])?;
        match &self.threshold {
            Some(threshold) => check_shape("threshold", threshold.shape(), rows)?,
            None => check_shape("lse", self.lse.shape(), rows)?,
        }
        self.entropy.as_ref().map_or(Ok(()), |e| check_shape("entropy", e.shape(), rows))?;
        match (self.seed, problem.inputs.seed) {
            (Some(forward), Some(seed)) if forward != seed => {
                Err(Error::value("seed", seed, format!("{forward}, the seed of the forward pass")))
            }
            _ => Ok(()),
        }
    }

    /// Checks that what a selection saves for the backward pass is present.
    pub(crate) fn check_saved(&self, attention: &Attention) -> Result<()> {
        let needs = |there: bool, tensor| match there {
            true => Ok(()),
            false => {
                Err(Error::Missing { tensor, needed_by: "this selection (is it the output of another attention?)" })
            }
        };
        match attention.select {
            Select::Soft => Ok(()),
            Select::Hard(choice) => {
                needs(self.chosen.is_some(), "chosen")?;
                needs(!choice.straight_through || self.saved.is_some(), "the soft output")
            }
            Select::TopK(_) => needs(self.chosen.is_some(), "chosen"),
            Select::Sparsemax => {
                needs(self.threshold.is_some(), "threshold")?;
                needs(self.saved.is_some(), "the mean of the values")
            }
        }
    }
}

fn check_shape<const R: usize>(tensor: &'static str, found: [usize; R], expected: [usize; R]) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(Error::shape(tensor, &found, format!("{expected:?}")))
}

/// The output of a softmax in the caller's memory, read by [`Attention::backward_into`].
///
/// ```
/// use qkv::{OutputRef, Tensor};
/// let (values, lse) = (Tensor::<f32, 4>::zeros([1, 2, 9, 4])?, vec![0.0; 2 * 9]);
/// let out = OutputRef::<f32>::new(&values, &lse);
/// # let _ = out;
/// # Ok::<(), qkv::Error>(())
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct OutputRef<'a, T: Element> {
    /// `[B, Hq, N, Dv]`, with any strides.
    pub values: View<'a, T>,
    /// The log-sum-exp `[B, Hq, N]`, or sparsemax's threshold.
    pub(crate) row_statistic: &'a [T::Acc],
    /// `[B, Hq, N]`, if the attention has [`with_entropy`](Attention::with_entropy).
    pub(crate) entropy: Option<&'a [T::Acc]>,
    pub(crate) chosen: Option<&'a Tensor<i64, 4>>,
    pub(crate) saved: Option<&'a Tensor<T::Acc, 4>>,
    /// The place of the queries, if it is not that of the description.
    pub(crate) place: Option<Place>,
}

impl<T: Element> Clone for OutputRef<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: Element> Copy for OutputRef<'_, T> {}

impl<'a, T: Element> OutputRef<'a, T> {
    /// Values `[B, Hq, N, Dv]` with any strides, and the log-sum-exp `[B, Hq, N]`.
    pub fn new(values: impl Into<View<'a, T>>, lse: &'a [T::Acc]) -> Self {
        let (entropy, chosen, saved, place) = (None, None, None, None);
        OutputRef { values: values.into(), row_statistic: lse, entropy, chosen, saved, place }
    }

    /// The entropy as well, `[B, Hq, N]`.
    pub fn entropy(mut self, entropy: &'a [T::Acc]) -> Self {
        self.entropy = Some(entropy);
        self
    }

    /// The place of the queries, after [`Attention::decode_into`]: [`Place::End`], or [`Place::Given`] with positions.
    pub fn place(mut self, place: Place) -> Self {
        self.place = Some(place);
        self
    }

    pub(crate) fn check(&self, problem: &Problem<'_, T>) -> Result<()> {
        let Problem { b, n, dv, heads, .. } = *problem;
        check_shape("out", self.values.shape(), [b, heads.query, n, dv])?;
        for (tensor, rows) in [("lse", Some(self.row_statistic)), ("entropy", self.entropy)] {
            if let Some(rows) = rows.filter(|rows| rows.len() != b * heads.query * n) {
                return Err(Error::shape(tensor, &[rows.len()], format!("[{b}, {}, {n}]", heads.query)));
            }
        }
        Ok(())
    }
}

/// The caller's memory for the output of a softmax.
///
/// ```
/// use qkv::{OutputMut, Tensor};
/// let mut values = Tensor::<f32, 4>::zeros([1, 2, 9, 4])?; // [B, Hq, N, Dv]
/// let mut lse = Tensor::<f32, 4>::zeros([1, 2, 9, 1])?;    // [B, Hq, N, 1]
/// let into = OutputMut::<f32>::new(&mut values, &mut lse);
/// assert!(into.entropy.is_none());
/// # Ok::<(), qkv::Error>(())
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct OutputMut<'a, T: Element> {
    /// `[B, Hq, N, Dv]`.
    pub values: ViewMut<'a, T>,
    /// `[B, Hq, N, 1]`.
    pub lse: ViewMut<'a, T::Acc>,
    /// `[B, Hq, N, 1]`, if the attention has [`with_entropy`](Attention::with_entropy).
    pub entropy: Option<ViewMut<'a, T::Acc>>,
}

impl<'a, T: Element> OutputMut<'a, T> {
    /// Memory for values `[B, Hq, N, Dv]` and log-sum-exp `[B, Hq, N, 1]`, with any strides.
    pub fn new(values: impl Into<ViewMut<'a, T>>, lse: impl Into<ViewMut<'a, T::Acc>>) -> Self {
        OutputMut { values: values.into(), lse: lse.into(), entropy: None }
    }

    /// Memory for the entropy as well, `[B, Hq, N, 1]`.
    pub fn entropy(mut self, entropy: impl Into<ViewMut<'a, T::Acc>>) -> Self {
        self.entropy = Some(entropy.into());
        self
    }

    pub(crate) fn check(&self, problem: &Problem<'_, T>) -> Result<()> {
        let Problem { b, n, dv, heads, .. } = *problem;
        check_shape("out", self.values.shape(), [b, heads.query, n, dv])?;
        check_shape("lse", self.lse.shape(), [b, heads.query, n, 1])?;
        match (&self.entropy, problem.attention.entropy) {
            (Some(entropy), true) => check_shape("entropy", entropy.shape(), [b, heads.query, n, 1]),
            (None, false) => Ok(()),
            (None, true) => Err(Error::Missing { tensor: "entropy", needed_by: "an attention with entropy" }),
            (Some(_), false) => {
                Err(Error::Unused { tensor: "entropy", reason: "the attention does not have `with_entropy`" })
            }
        }
    }
}
