//! The calls on an [`Attention`]: forward, backward, weights, decoding, and the tiles that the engine will visit.

use super::{Attention, Tiles};
use crate::decode::Decode;
use crate::element::Element;
use crate::error::Result;
use crate::exact;
use crate::gradients::{Gradients, GradientsMut};
use crate::inputs::{Inputs, Upstream};
use crate::output::{Output, OutputMut, OutputRef};
use crate::problem::Problem;
use crate::score::Score;
use crate::scratch::Scratch;
use crate::select::Select;
use crate::tensor::Tensor;
use crate::weights::Weights;

impl Attention {
    /// Computes the attention, exactly and in linear memory, on the threads of the current rayon pool.
    pub fn forward<T: Element>(&self, inputs: Inputs<'_, T>) -> Result<Output<T>> {
        self.forward_with(inputs, T::scratch(), rayon::current_num_threads())
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

    /// [`forward`](Attention::forward) into the caller's memory, with reusable scratch and a number of threads: beyond
    /// what the scratch already holds, only a few words per block are allocated.
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

    /// Computes the gradients of all given inputs from the output of [`forward`](Attention::forward) and the upstream
    /// gradients: in one pass, in linear memory, with the same bits for any number of threads.
    pub fn backward<T: Element>(
        &self,
        inputs: Inputs<'_, T>,
        out: &Output<T>,
        upstream: Upstream<'_, T>,
    ) -> Result<Gradients<T>> {
        self.backward_with(inputs, out, upstream, T::scratch(), rayon::current_num_threads())
    }

    /// [`backward`](Attention::backward) with reusable scratch and a number of threads.
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

    /// [`backward`](Attention::backward) of a softmax from and into the caller's memory, with any strides: the output
    /// of [`forward_into`](Attention::forward_into) is read and the gradients are written in place, without copies. The
    /// bits are the same as those of [`backward`](Attention::backward).
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
    /// what [`forward`](Attention::forward) saved.
    pub fn weights<'a, T: Element>(&'a self, inputs: Inputs<'a, T>, out: &'a Output<T>) -> Result<Weights<'a, T>> {
        let problem = Problem::placed(self, inputs, out.place)?;
        out.check(&problem)?;
        out.check_saved(self)?;
        Ok(Weights::new(problem, out.as_ref()))
    }

    /// Attends from a few new queries to a growing cache of keys and values. The queries stand at the end of the keys,
    /// or where [`Inputs::positions`](crate::Inputs::positions) puts them; a description with another
    /// [`Place`](crate::Place) is an error.
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
        self.decode_with(inputs, how, T::scratch(), rayon::current_num_threads())
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

    /// [`decode`](Attention::decode) into the caller's memory, with reusable scratch and a number of threads: what
    /// [`forward_into`](Attention::forward_into) is to [`forward`](Attention::forward).
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

    /// Refuses selections that return more than the caller's memory has room for.
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

    /// How many tiles of each kind the mask leaves, in all sequences and heads: the tiles that the engine will visit.
    /// Linear attention visits none.
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
