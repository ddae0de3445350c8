//! A description and its inputs, validated against each other: what every engine starts from. After [`Problem::new`]
//! all shapes agree, every required tensor is present, and every parameter is in range.

use crate::attention::Attention;
use crate::bias::alibi_slopes;
use crate::error::{Error, Result};
use crate::feature;
use crate::heads::Heads;
use crate::inputs::{Inputs, Upstream};
use crate::mask::{Mask, MaskData};
use crate::place::Place;
use crate::score::{Scale, Score};
use crate::select::Select;
use crate::tensor::checked_len;
use qkv_simd::{Element, View};

/// The largest absolute position of a query: beyond any sequence, and far from overflow.
const FARTHEST: i64 = 1 << 52;

/// A validated description with its inputs.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Problem<'a, T: Element> {
    /// The description.
    pub attention: &'a Attention,
    /// The inputs.
    pub inputs: Inputs<'a, T>,
    /// Query and key heads.
    pub heads: Heads,
    /// Sequences.
    pub b: usize,
    /// Queries.
    pub n: usize,
    /// Keys.
    pub m: usize,
    /// The width of queries as given.
    pub d: usize,
    /// The width of keys as given.
    pub dk: usize,
    /// The width of values.
    pub dv: usize,
    /// The width in which scores are computed: `D`, `Dk` for the general score, `A` for the additive.
    pub width: usize,
    pub(crate) mask_data: MaskData<'a>,
    /// The bias tensor, broadcast to `[B, Hq, N, M]`.
    pub bias: Option<View<'a, T>>,
    /// The ALiBi slope of each query head; empty without ALiBi.
    pub slopes: Vec<f64>,
}

impl<'a, T: Element> Problem<'a, T> {
    /// With the queries at the place of the description.
    pub fn new(attention: &'a Attention, inputs: Inputs<'a, T>) -> Result<Self> {
        Problem::placed(attention, inputs, attention.place)
    }

    /// With the queries at another place: at the end while decoding.
    pub fn placed(attention: &'a Attention, inputs: Inputs<'a, T>, place: Place) -> Result<Self> {
        let [b, hq, n, d] = inputs.q.shape();
        let [bk, hk, m, dk] = inputs.k.shape();
        let [bv, hv, mv, dv] = inputs.v.shape();
        if bk != b {
            return Err(Error::shape("k", &inputs.k.shape(), format!("a batch of {b}, as `q` has")));
        }
        if (bv, hv, mv) != (b, hk, m) {
            let expected = format!("[{b}, {hk}, {m}, …], as `k` has");
            return Err(Error::shape("v", &inputs.v.shape(), expected));
        }
        let heads = Heads::new(hq, hk)?;
        // Axes of 0 count as 1, so that no product of sizes below can overflow.
        let at_least_one = |shape: [usize; 4]| shape.map(|axis| axis.max(1));
        checked_len::<f64>("out", &at_least_one([b, hq, n, dv.max(d)]))?;
        checked_len::<f64>("k", &at_least_one([b, hk, m, dk.max(dv)]))?;
        let width = score_width(attention.score, &inputs, heads, d, dk)?;
        let slopes = if attention.bias.alibi { alibi_slopes(hq) } else { Vec::new() };
        let mask_data = MaskData {
            place,
            positions: inputs.positions,
            lengths: inputs.lengths,
            segments: inputs.segments,
            bits: broadcast("bits", inputs.bits, [b, hq, n, m])?,
            buckets: inputs.buckets,
            group: heads.group,
            heads: hq,
            centers: inputs.center.map(|center| center.iter().map(|c| c.to_f64()).collect()),
            ..MaskData::new(n, m)
        };
        let bias = broadcast("bias", inputs.bias, [b, hq, n, m])?;
        let problem = Problem { attention, inputs, heads, b, n, m, d, dk, dv, width, mask_data, bias, slopes };
        feature::check(attention, d, dv)?;
        problem.check_numbers()?;
        problem.check_mask()?;
        problem.check_bias()?;
        problem.check_selection()?;
        Ok(problem)
    }

    /// With the queries at the end of the keys, or at the given positions.
    pub fn decoding(attention: &'a Attention, inputs: Inputs<'a, T>) -> Result<Self> {
        let place = match (attention.place, inputs.positions) {
            (Place::Start | Place::Given, Some(_)) => Place::Given,
            (Place::Start | Place::End, None) => Place::End,
            (Place::Given, None) => return Err(Error::Missing { tensor: "positions", needed_by: "a given place" }),
            (Place::End | Place::Offset(_), _) => {
                return Err(Error::Conflict {
                    first: "a place",
                    second: "decoding",
                    reason: "its queries stand at the end of the keys, or at the input `positions`",
                });
            }
        };
        Problem::placed(attention, inputs, place)
    }

    fn check_numbers(&self) -> Result<()> {
        let Attention { scale, temperature, softcap, dropout, sinks, .. } = self.attention;
        let hq = self.heads.query;
        match (scale, self.inputs.scale) {
            (Scale::Fixed(scale), _) if !scale.is_finite() => Err(Error::value("scale", scale, "a finite number")),
            (Scale::Learned, None) => Err(Error::Missing { tensor: "scale", needed_by: "a learned scale" }),
            (Scale::Learned, Some(given)) if given.len() != 1 && given.len() != hq => {
                Err(Error::shape("scale", &[given.len()], format!("[1] or [{hq}]")))
            }
            (Scale::Own | Scale::Fixed(_), Some(_)) => {
                Err(Error::Unused { tensor: "scale", reason: "the attention has no learned scale" })
            }
            _ => Ok(()),
        }?;
        if let Some(t) = temperature.filter(|t| !(t.is_finite() && *t > 0.0)) {
            return Err(Error::value("temperature", t, "a finite number above 0"));
        }
        if let Some(cap) = softcap.filter(|cap| !(cap.is_finite() && *cap > 0.0)) {
            return Err(Error::value("softcap", cap, "a finite number above 0"));
        }
        dropout.map_or(Ok(()), |dropout| dropout.check())?;
        given_if(*sinks, self.inputs.sinks.is_some(), "sinks", "attention with sinks", "the attention has no sinks")?;
        match self.inputs.sinks {
            Some(sinks) if sinks.len() != hq => {
                Err(Error::shape("sinks", &[sinks.len()], format!("[{hq}], one a query head")))
            }
            _ => Ok(()),
        }
    }

    fn check_mask(&self) -> Result<()> {
        let (mask, inputs, &Problem { b, n, m, .. }) = (&self.attention.mask, &self.inputs, self);
        mask.check(n, m)?;
        let unused = "no rule of the mask looks at it";
        given_if(mask.uses(&Mask::Lengths), inputs.lengths.is_some(), "lengths", "a padding mask", unused)?;
        given_if(mask.uses(&Mask::Segments), inputs.segments.is_some(), "segments", "a segment mask", unused)?;
        given_if(mask.uses(&Mask::Bits), inputs.bits.is_some(), "bits", "a mask of bits", unused)?;
        if let Some(lengths) = inputs.lengths {
            if lengths.len() != b {
                return Err(Error::shape("lengths", &[lengths.len()], format!("[{b}], one a sequence")));
            }
            if let Some(longest) = lengths.iter().find(|&&length| length > m) {
                return Err(Error::value("lengths", longest, format!("at most {m}, the number of keys")));
            }
        }
        if let Some((queries, keys)) = inputs.segments {
            if queries.len() != b * n {
                return Err(Error::shape("segments_q", &[queries.len()], format!("[{b}, {n}], one a query")));
            }
            if keys.len() != b * m {
                return Err(Error::shape("segments_k", &[keys.len()], format!("[{b}, {m}], one a key")));
            }
        }
        given_if(mask.lsh_buckets().is_some(), inputs.buckets.is_some(), "buckets", "a mask of hash buckets", unused)?;
        if let (Some(lsh), Some((queries, keys))) = (mask.lsh_buckets(), inputs.buckets) {
            for (tensor, found, expected) in [
                ("buckets of queries", queries.shape(), [b, self.heads.query, n, lsh.rounds]),
                ("buckets of keys", keys.shape(), [b, self.heads.key, m, lsh.rounds]),
            ] {
                if found != expected {
                    return Err(Error::shape(tensor, &found, format!("{expected:?}")));
                }
            }
        }
        let far = |at: i64| Error::value("place", at, format!("between −{FARTHEST} and {FARTHEST}"));
        if let Place::Offset(offset) = self.mask_data.place
            && offset.saturating_abs() > FARTHEST
        {
            return Err(far(offset));
        }
        let placed = self.mask_data.place == Place::Given;
        given_if(placed, inputs.positions.is_some(), "positions", "a given place", "the place is not taken from it")?;
        match inputs.positions {
            Some(positions) if positions.len() != b * n => {
                Err(Error::shape("positions", &[positions.len()], format!("[{b}, {n}], one a query")))
            }
            Some(positions) => match positions.iter().find(|at| at.saturating_abs() > FARTHEST) {
                Some(&at) => Err(far(at)),
                None => Ok(()),
            },
            None => Ok(()),
        }
    }

    fn check_bias(&self) -> Result<()> {
        let (bias, inputs, hq) = (&self.attention.bias, &self.inputs, self.heads.query);
        given_if(bias.tensor, inputs.bias.is_some(), "bias", "a tensor bias", "the attention has no tensor bias")?;
        let relative = bias.relative.is_some();
        if bias.two_tables {
            return Err(Error::Conflict {
                first: "a relative bias",
                second: "another",
                reason: "a call has only one `table`",
            });
        }
        given_if(relative, inputs.table.is_some(), "table", "a relative bias", "the attention has no relative bias")?;
        if let (Some(reach), Some(table)) = (bias.relative, inputs.table) {
            let [one, first, rows, cols] = table.shape();
            let entries = reach.checked_mul(2).and_then(|twice| twice.checked_add(1));
            if one != 1 || first != 1 || (rows != 1 && rows != hq) || Some(cols) != entries {
                let expected = format!("[{hq}, 2·{reach} + 1] or [1, 2·{reach} + 1]");
                return Err(Error::shape("table", &table.shape()[2..], expected));
            }
        }
        Ok(())
    }

    /// Checks combinations with selections other than softmax and with predicted centers.
    fn check_selection(&self) -> Result<()> {
        let Attention { select, dropout, sinks, entropy, local, .. } = self.attention;
        let conflict = |first, second, reason| Err(Error::Conflict { first, second, reason });
        if self.attention.misplaced_straight_through {
            return conflict("straight-through", "a selection that is not hard", "it comes after `hard` or `sample`");
        }
        if *select != Select::Soft {
            let other = "a selection other than softmax";
            if dropout.is_some_and(|dropout| dropout.p > 0.0) {
                return conflict("dropout", other, "it drops weights of a softmax");
            }
            if *sinks {
                return conflict("a sink", other, "it takes its share of a softmax");
            }
            if local.is_some() {
                return conflict("predictive local attention", other, "its Gaussian weighs a softmax");
            }
        }
        match select {
            Select::TopK(0) => return Err(Error::value("top-k", 0, "at least 1 key")),
            Select::TopK(_) | Select::Sparsemax if *entropy => {
                return conflict("entropy", "top-k or sparsemax", "it is that of a softmax over all keys");
            }
            _ => {}
        }
        if self.attention.draws() && self.inputs.seed.is_none() {
            let needed_by = if dropout.is_some() { "dropout" } else { "sampled hard attention" };
            return Err(Error::Missing { tensor: "seed", needed_by });
        }
        given_if(
            local.is_some(),
            self.inputs.center.is_some(),
            "center",
            "local attention",
            "the attention is not local",
        )?;
        match (local, self.inputs.center) {
            (Some(0), _) => Err(Error::value("local", 0, "a half width of at least 1")),
            (_, Some(center)) if center.len() != self.b * self.heads.query * self.n => {
                let expected = format!("[{}, {}, {}], one a query", self.b, self.heads.query, self.n);
                Err(Error::shape("center", &[center.len()], expected))
            }
            (_, Some(center)) if center.iter().any(|c| !c.is_finite()) => {
                Err(Error::value("center", "not finite", "a place among the keys"))
            }
            _ => Ok(()),
        }
    }

    /// Where the queries stand.
    pub fn place(&self) -> Place {
        self.mask_data.place
    }

    /// The seed of the call; 0 if it draws nothing.
    pub fn seed(&self) -> u64 {
        self.inputs.seed.unwrap_or(0)
    }

    /// The factor of the raw scores of a query head: its scale divided by the temperature.
    pub fn scale(&self, h: usize) -> f64 {
        if let Score::Linear(_) = self.attention.score {
            return 1.0; // its scale is part of its features
        }
        let scale = match (self.attention.scale, self.inputs.scale) {
            (Scale::Fixed(scale), _) => scale,
            (Scale::Learned, Some(given)) => given[h % given.len()].to_f64(),
            _ if self.attention.score == Score::ScaledDot => 1.0 / (self.d.max(1) as f64).sqrt(),
            _ => 1.0,
        };
        scale / self.temperature()
    }

    /// The divisor of scores, after the scale.
    pub fn temperature(&self) -> f64 {
        self.attention.temperature.unwrap_or(1.0)
    }

    /// The entry of the relative table for a query at `p` and a key at `j`.
    pub fn table_entry(&self, p: i64, j: usize) -> usize {
        let reach = self.attention.bias.relative.unwrap_or(0) as i64;
        ((j as i64 - p).clamp(-reach, reach) + reach) as usize
    }

    /// Checks the shapes of upstream gradients.
    pub fn check_upstream(&self, upstream: &Upstream<'_, T>, entropy_kept: bool) -> Result<()> {
        let Problem { b, n, dv, heads, .. } = *self;
        let expected = [b, heads.query, n, dv];
        if upstream.values.shape() != expected {
            return Err(Error::shape("d_out", &upstream.values.shape(), format!("{expected:?}, as the output has")));
        }
        for (tensor, given) in
            [("d_lse", upstream.lse), ("d_entropy", upstream.entropy), ("d_log_prob", upstream.log_prob)]
        {
            if let Some(given) = given.filter(|given| given.len() != b * heads.query * n) {
                return Err(Error::shape(tensor, &[given.len()], format!("[{b}, {}, {n}]", heads.query)));
            }
        }
        let hard = matches!(self.attention.select, Select::Hard(_));
        if upstream.log_prob.is_some() && !hard {
            return Err(Error::Unused { tensor: "d_log_prob", reason: "only hard attention has a log-probability" });
        }
        if upstream.lse.is_some() && self.attention.select == Select::Sparsemax {
            return Err(Error::Unused { tensor: "d_lse", reason: "sparsemax has a threshold in its place" });
        }
        if upstream.entropy.is_some() && !entropy_kept {
            return Err(Error::Missing {
                tensor: "entropy",
                needed_by: "its gradient (ask for it with `with_entropy`)",
            });
        }
        Ok(())
    }
}

/// Checks that a tensor is present if and only if it is needed.
fn given_if(
    asked: bool,
    given: bool,
    tensor: &'static str,
    needed_by: &'static str,
    reason: &'static str,
) -> Result<()> {
    match (asked, given) {
        (true, false) => Err(Error::Missing { tensor, needed_by }),
        (false, true) => Err(Error::Unused { tensor, reason }),
        _ => Ok(()),
    }
}

fn broadcast<'a, U>(
    tensor: &'static str,
    given: Option<View<'a, U>>,
    shape: [usize; 4],
) -> Result<Option<View<'a, U>>> {
    let Some(view) = given else { return Ok(None) };
    let expected = || format!("something that broadcasts to {shape:?}");
    view.broadcast(shape).map(Some).ok_or_else(|| Error::shape(tensor, &view.shape(), expected()))
}

/// A matrix `[rows, cols]`, one for all or one for each of `heads`.
fn check_matrix<T>(tensor: &'static str, w: View<'_, T>, heads: usize, rows: usize, cols: usize) -> Result<()> {
    let [one, per_head, r, c] = w.shape();
    if one == 1 && (per_head == 1 || per_head == heads) && (r, c) == (rows, cols) {
        return Ok(());
    }
    Err(Error::shape(tensor, &w.shape()[1..], format!("[{rows}, {cols}], or [{heads}, {rows}, {cols}] for one a head")))
}

/// The width in which scores are computed; an error if widths and matrices do not agree.
fn score_width<T: Element>(score: Score, inputs: &Inputs<'_, T>, heads: Heads, d: usize, dk: usize) -> Result<usize> {
    let unused = |tensor| Error::Unused { tensor, reason: "the score has no such parameter" };
    let general = score == Score::General;
    if !general && inputs.w.is_some() {
        return Err(unused("w"));
    }
    if score != Score::Additive {
        for (tensor, given) in
            [("w_q", inputs.w_q.is_some()), ("w_k", inputs.w_k.is_some()), ("v_score", inputs.v_score.is_some())]
        {
            if given {
                return Err(unused(tensor));
            }
        }
    }
    match score {
        Score::General => {
            let w = inputs.w.ok_or(Error::Missing { tensor: "w", needed_by: "the general score" })?;
            check_matrix("w", w, heads.query, d, dk)?;
            Ok(dk)
        }
        Score::Additive => {
            let needed_by = "the additive score";
            let width = inputs.v_score.ok_or(Error::Missing { tensor: "v_score", needed_by })?.len();
            let projected = |name, w: Option<View<'_, T>>, heads, cols| match w {
                Some(w) => check_matrix(name, w, heads, width, cols),
                None if cols == width => Ok(()),
                None => Err(Error::Missing { tensor: name, needed_by }),
            };
            projected("w_q", inputs.w_q, heads.query, d)?;
            projected("w_k", inputs.w_k, heads.key, dk)?;
            Ok(width)
        }
        _ if d != dk => {
            let expected = format!("a width of {d}, as `q` has (only general and additive scores take two widths)");
            Err(Error::shape("k", &inputs.k.shape(), expected))
        }
        Score::Linear(features) => Ok(features.count(d)),
        _ => Ok(d),
    }
}
