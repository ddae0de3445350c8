//! Golden values: the outputs and gradients of PyTorch for a few dozen small attentions. `golden/make.py` computed them
//! and says how; inputs are computed here by the same arithmetic, so that only results are stored.
//!
//! The engine is held to them in `f64` and in `f32`, and so is the definition that everything else is held to.

use qkv::reference::Reference;
use qkv::{Attention, Element, Gradients, Inputs, Output, Real, Tensor, Upstream, View};
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::LazyLock;

/// The tensors that are made from numbers, in the order of their seeds: as in `make.py`.
const FLOATS: [&str; 14] =
    ["q", "k", "v", "d_out", "w", "w_q", "w_k", "v_score", "scale", "bias", "table", "sinks", "d_lse", "d_entropy"];

static CASES: LazyLock<Vec<Value>> = LazyLock::new(|| {
    let file: Value = serde_json::from_str(include_str!("golden/values.json")).expect("the file is JSON");
    file["cases"].as_array().expect("a list of cases").clone()
});

/// A number from [−2, 2), a whole multiple of 1/16384: as in `make.py`.
fn number(seed: u64, at: u64) -> f64 {
    let mut h = (at as u32).wrapping_mul(2654435761).wrapping_add((seed as u32).wrapping_mul(2246822519));
    h = h.wrapping_add(374761393);
    h ^= h >> 15;
    h = h.wrapping_mul(2246822507);
    h ^= h >> 13;
    h = h.wrapping_mul(3266489909);
    h ^= h >> 16;
    f64::from(h >> 16) / 16384.0 - 2.0
}

fn text(value: &Value) -> &str {
    value.as_str().expect("text")
}

/// Numbers, `null` standing for minus infinity.
fn numbers(value: &Value) -> Vec<f64> {
    let list = value.as_array().expect("a list");
    list.iter().map(|x| if x.is_null() { f64::NEG_INFINITY } else { x.as_f64().expect("a number") }).collect()
}

fn whole<I: TryFrom<i64, Error: std::fmt::Debug>>(value: &Value) -> Vec<I> {
    let list = value.as_array().expect("a list");
    list.iter().map(|x| I::try_from(x.as_i64().expect("a whole number")).expect("in range")).collect()
}

fn four_axes(value: &Value) -> [usize; 4] {
    let axes: Vec<usize> = whole(value);
    let mut shape = [1; 4];
    shape[4 - axes.len()..].copy_from_slice(&axes);
    shape
}

/// The tensors of a case, in the type it is run in.
struct Given<T> {
    floats: BTreeMap<String, Tensor<T, 4>>,
    lengths: Option<Vec<usize>>,
    segments: Option<(Vec<i32>, Vec<i32>)>,
    bits: Option<Tensor<u8, 4>>,
}

impl<T: Element> Given<T> {
    fn new(case: &Value) -> Self {
        let seed = case["seed"].as_u64().expect("a seed");
        let tensor = |(name, shape): (&String, &Value)| {
            let (shape, place) = (four_axes(shape), FLOATS.iter().position(|float| float == name).expect("a name"));
            let made = |at| number(seed + place as u64, at as u64);
            let data = case.get("values").and_then(|values| values.get(name)).map(numbers);
            let data = data.unwrap_or_else(|| (0..shape.iter().product()).map(made).collect());
            let data = data.into_iter().map(T::of_f64).collect();
            (name.clone(), Tensor::new(data, shape).expect("as many numbers as the shape has"))
        };
        let data = case.get("data").unwrap_or(&Value::Null);
        let bits = data.get("mask").map(|mask| Tensor::new(whole(&mask["bits"]), four_axes(&mask["shape"])));
        Given {
            floats: case["shapes"].as_object().expect("shapes").iter().map(tensor).collect(),
            lengths: data.get("lengths").map(whole),
            segments: data.get("segments_q").map(|queries| (whole(queries), whole(&data["segments_k"]))),
            bits: bits.map(|bits| bits.expect("as many bits as the shape has")),
        }
    }

    fn get(&self, name: &str) -> Option<&Tensor<T, 4>> {
        self.floats.get(name)
    }

    fn inputs(&self) -> Inputs<'_, T> {
        let mut inputs = Inputs::new(&self.floats["q"], &self.floats["k"], &self.floats["v"]);
        type Take<'a, T, G> = fn(Inputs<'a, T>, G) -> Inputs<'a, T>;
        let views: [(&str, Take<'_, T, View<'_, T>>); 5] = [
            ("w", |inputs, x| inputs.w(x)),
            ("w_q", |inputs, x| inputs.w_q(x)),
            ("w_k", |inputs, x| inputs.w_k(x)),
            ("bias", |inputs, x| inputs.bias(x)),
            ("table", |inputs, x| inputs.table(x)),
        ];
        for (name, take) in views {
            inputs = self.get(name).map_or(inputs, |tensor| take(inputs, tensor.into()));
        }
        let slices: [(&str, Take<'_, T, &[T]>); 3] = [
            ("v_score", |inputs, x| inputs.v_score(x)),
            ("scale", |inputs, x| inputs.scale(x)),
            ("sinks", |inputs, x| inputs.sinks(x)),
        ];
        for (name, take) in slices {
            inputs = self.get(name).map_or(inputs, |tensor| take(inputs, tensor.data()));
        }
        inputs = self.lengths.as_ref().map_or(inputs, |lengths| inputs.lengths(lengths));
        inputs = self.segments.as_ref().map_or(inputs, |(queries, keys)| inputs.segments(queries, keys));
        self.bits.as_ref().map_or(inputs, |bits| inputs.bits(bits))
    }

    fn upstream(&self) -> Upstream<'_, T>
    where
        T: Element<Acc = T>,
    {
        let mut upstream = Upstream::new(&self.floats["d_out"]);
        upstream = self.get("d_lse").map_or(upstream, |d| upstream.lse(d.data()));
        self.get("d_entropy").map_or(upstream, |d| upstream.entropy(d.data()))
    }
}

/// All results, by their names in the file.
fn results<F: Real + Element>(out: Output<F>, weights: Vec<F>, grad: Gradients<F>) -> BTreeMap<&'static str, Vec<F>> {
    let tensor = |grad: Option<Tensor<F, 4>>| grad.map(Tensor::into_data);
    let found = [
        ("out", Some(out.values.into_data())),
        ("lse", Some(out.lse.into_data())),
        ("entropy", out.entropy.map(Tensor::into_data)),
        ("weights", Some(weights)),
        ("d_q", Some(grad.q.into_data())),
        ("d_k", Some(grad.k.into_data())),
        ("d_v", Some(grad.v.into_data())),
        ("d_w", tensor(grad.w)),
        ("d_w_q", tensor(grad.w_q)),
        ("d_w_k", tensor(grad.w_k)),
        ("d_v_score", grad.v_score),
        ("d_scale", grad.scale),
        ("d_bias", tensor(grad.bias)),
        ("d_table", tensor(grad.table)),
        ("d_sinks", grad.sinks),
    ];
    found.into_iter().filter_map(|(name, data)| Some((name, data?))).collect()
}

fn by_the_engine<F: Real + Element>(
    attention: &Attention,
    given: &Given<F>,
) -> qkv::Result<BTreeMap<&'static str, Vec<F>>> {
    let out = attention.forward(given.inputs())?;
    let [b, hq, n] = out.lse.shape();
    let asked = attention.weights(given.inputs(), &out)?;
    let mut weights = Vec::new();
    for (b, h) in (0..b).flat_map(|b| (0..hq).map(move |h| (b, h))) {
        weights.extend(asked.rows(b, h, 0..n)?.into_data());
    }
    let grad = attention.backward(given.inputs(), &out, given.upstream())?;
    Ok(results(out, weights, grad))
}

fn by_the_definition(attention: &Attention, given: &Given<f64>) -> qkv::Result<BTreeMap<&'static str, Vec<f64>>> {
    let definition = Reference::<f64>::exact();
    let forward = definition.forward(attention, given.inputs())?;
    let grad = definition.backward(attention, given.inputs(), &forward, given.upstream())?;
    Ok(results(forward.output, forward.weights.into_data(), grad))
}

/// How far a result is from PyTorch's, relative to the largest number of PyTorch's; infinite if one of them is not
/// finite and the other is not the same.
fn error<F: Real + Element>(found: &[F], expected: &[f64], every: usize) -> f64 {
    let found: Vec<f64> = found.iter().step_by(every).map(|x| x.to_f64()).collect();
    assert_eq!(found.len(), expected.len(), "as many numbers as PyTorch gives");
    let largest = expected.iter().filter(|x| x.is_finite()).fold(0.0f64, |largest, x| largest.max(x.abs()));
    let apart = |(found, expected): (&f64, &f64)| match found - expected {
        _ if found == expected => 0.0,
        apart if apart.is_finite() => apart.abs() / largest.max(1e-3),
        _ => f64::INFINITY,
    };
    found.iter().zip(expected).map(apart).fold(0.0, f64::max)
}

fn hold<F: Real + Element>(
    group: &str,
    tolerance: f64,
    compute: impl Fn(&Attention, &Given<F>) -> qkv::Result<BTreeMap<&'static str, Vec<F>>>,
) {
    let mut wrong = Vec::new();
    let mut seen = 0;
    for case in CASES.iter().filter(|case| case["group"] == group) {
        seen += 1;
        let attention: Attention = serde_json::from_value(case["attention"].clone()).expect("a description");
        let found = compute(&attention, &Given::new(case)).unwrap_or_else(|error| panic!("{}: {error}", case["name"]));
        let every = case.get("every").map_or(1, |every| every.as_u64().expect("a number") as usize);
        for (what, expected) in case["expected"].as_object().expect("results") {
            let found = found.get(what.as_str()).unwrap_or_else(|| panic!("{}: no {what}", case["name"]));
            let error = error(found, &numbers(expected), every);
            if error > tolerance {
                wrong.push(format!("{} in {}: {what} is off by {error:.1e}", text(&case["name"]), F::NAME));
            }
        }
    }
    assert!(seen > 0, "no case of {group}");
    assert!(wrong.is_empty(), "{} results differ from PyTorch's:\n{}", wrong.len(), wrong.join("\n"));
}

fn holds(group: &str) {
    hold::<f64>(group, 1e-12, by_the_engine);
    hold::<f32>(group, 1e-5, by_the_engine);
    hold::<f64>(group, 1e-12, by_the_definition);
}

#[test]
fn every_argument_of_scaled_dot_product_attention_gives_what_pytorch_gives() {
    holds("sdpa");
}

#[test]
fn the_core_of_multihead_attention_gives_what_pytorch_gives() {
    holds("multihead");
}

#[test]
fn every_score_and_its_parameters_give_what_pytorch_gives() {
    holds("scores");
}

#[test]
fn scales_caps_and_biases_give_what_pytorch_gives() {
    holds("on top");
}

#[test]
fn sinks_entropy_and_log_sum_exp_give_what_pytorch_gives() {
    holds("selection");
}

#[test]
fn every_mask_gives_what_pytorch_gives() {
    holds("masks");
}

#[test]
fn no_case_of_the_file_is_left_out() {
    let groups = ["sdpa", "multihead", "scores", "on top", "selection", "masks"];
    for case in CASES.iter() {
        assert!(groups.contains(&text(&case["group"])), "{} belongs to no test", case["name"]);
    }
    assert!(CASES.len() >= 60);
}
