//! Writes cases of the suite, with the results of the exact engine, for other languages: `export FILE`. The engine is
//! held to the definition by this suite; a binding for another language is held to the engine, bit for bit.
//!
//! The file is a line of JSON for each case, `{"name", "attention", "type", "tensors": {name: [type, shape]}}`,
//! followed by the bytes of its tensors in this order, little-endian. Inputs have their own names, results `out.…` and
//! gradients `grad.…`.

use qkv::Element;
use qkv_conformance::case::{Case, Data};
use qkv_conformance::grid;
use qkv_conformance::sample::Sample;
use std::io::{BufWriter, Write};

/// Cases with more pairs of queries and keys than this are left out: they test the engine, not a binding.
const LARGEST: usize = 40_000;

struct Entry {
    name: String,
    shape: Vec<usize>,
    dtype: &'static str,
    bytes: Vec<u8>,
}

#[derive(Default)]
struct Entries(Vec<Entry>);

impl Entries {
    fn put(&mut self, name: &str, dtype: &'static str, shape: &[usize], bytes: Vec<u8>) {
        self.0.push(Entry { name: name.into(), shape: shape.to_vec(), dtype, bytes });
    }

    fn floats<T: Float>(&mut self, name: &str, shape: &[usize], data: &[T]) {
        self.put(name, T::TYPE, shape, data.iter().flat_map(|x| x.bytes()).collect());
    }

    fn integers(&mut self, name: &str, shape: &[usize], data: impl Iterator<Item = i64>) {
        self.put(name, "int64", shape, data.flat_map(i64::to_le_bytes).collect());
    }
}

trait Float: Copy {
    const TYPE: &'static str;
    fn bytes(self) -> Vec<u8>;
}

macro_rules! floats {
    ($($t:ty: $name:literal;)*) => {$(
        impl Float for $t {
            const TYPE: &'static str = $name;
            fn bytes(self) -> Vec<u8> {
                self.to_le_bytes().to_vec()
            }
        }
    )*};
}
floats! { f32: "float32"; f64: "float64"; qkv::half::bf16: "bfloat16"; qkv::half::f16: "float16"; }

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("usage: export FILE")?;
    let mut to = BufWriter::new(std::fs::File::create(path)?);
    let every = [
        grid::shapes(),
        grid::heads(),
        grid::on_top(),
        grid::masks(),
        grid::selection(),
        grid::choices(),
        grid::local(),
        grid::hashed(),
        grid::linear(),
    ];
    let cases = Sample::from_env().draw(every.concat(), |case| &case.name);
    for case in cases.iter().filter(|case| case.sizes.b * case.sizes.hq * case.sizes.n * case.sizes.m <= LARGEST) {
        write::<f32>(&mut to, case)?;
        write::<f64>(&mut to, case)?;
        write::<qkv::half::bf16>(&mut to, case)?;
        write::<qkv::half::f16>(&mut to, case)?;
    }
    to.flush()?;
    Ok(())
}

fn write<T>(to: &mut impl Write, case: &Case) -> Result<(), Box<dyn std::error::Error>>
where
    T: Element + qkv_simd::Element<Acc: Float> + Float,
{
    let data = case.data::<T>();
    let out = case.attention.forward(data.inputs())?;
    let grad = case.attention.backward(data.inputs(), &out, data.upstream())?;
    let mut entries = Entries::default();
    inputs(&mut entries, case, &data);
    entries.floats("out.values", &out.values.shape(), out.values.data());
    let rows = [("lse", Some(&out.lse)), ("threshold", out.threshold.as_ref()), ("entropy", out.entropy.as_ref())];
    for (name, found) in rows.into_iter().chain([("log_prob", out.log_prob.as_ref())]) {
        if let Some(found) = found.filter(|found| !found.data().is_empty()) {
            entries.floats(&format!("out.{name}"), &found.shape(), found.data());
        }
    }
    for (name, found) in [("q", &grad.q), ("k", &grad.k), ("v", &grad.v)] {
        entries.floats(&format!("grad.{name}"), &found.shape(), found.data());
    }
    let tensors =
        [("w", &grad.w), ("w_q", &grad.w_q), ("w_k", &grad.w_k), ("bias", &grad.bias), ("table", &grad.table)];
    for (name, found) in tensors {
        if let Some(found) = found {
            entries.floats(&format!("grad.{name}"), &found.shape(), found.data());
        }
    }
    let vectors =
        [("v_score", &grad.v_score), ("scale", &grad.scale), ("sinks", &grad.sinks), ("center", &grad.center)];
    for (name, found) in vectors {
        if let Some(found) = found {
            entries.floats(&format!("grad.{name}"), &[found.len()], found);
        }
    }
    let listed = entries.0.iter().map(|entry| format!("{:?}: [{:?}, {:?}]", entry.name, entry.dtype, entry.shape));
    let listed: Vec<String> = listed.collect();
    let attention = serde_json::to_string(&case.attention)?;
    writeln!(
        to,
        "{{\"name\": {:?}, \"attention\": {attention:?}, \"type\": {:?}, \"tensors\": {{{}}}}}",
        case.name,
        <T as Float>::TYPE,
        listed.join(", ")
    )?;
    for entry in &entries.0 {
        to.write_all(&entry.bytes)?;
    }
    Ok(())
}

/// The inputs and the upstream gradients of a case.
fn inputs<T>(entries: &mut Entries, case: &Case, data: &Data<T>)
where
    T: Element + qkv_simd::Element<Acc: Float> + Float,
{
    let sizes = case.sizes;
    let rows = [sizes.b, sizes.hq, sizes.n];
    for (name, tensor) in [("q", &data.q), ("k", &data.k), ("v", &data.v), ("d_out", &data.d_out)] {
        entries.floats(name, &tensor.shape(), tensor.data());
    }
    for (name, tensor) in [("w", &data.w), ("w_q", &data.w_q), ("w_k", &data.w_k), ("bias", &data.bias)] {
        if let Some(tensor) = tensor {
            entries.floats(name, &tensor.shape(), tensor.data());
        }
    }
    if let Some(table) = &data.table {
        entries.floats("table", &table.shape(), table.data());
    }
    for (name, vector) in [("v_score", &data.v_score), ("scale", &data.scale), ("sinks", &data.sinks)] {
        if let Some(vector) = vector {
            entries.floats(name, &[vector.len()], vector);
        }
    }
    if let Some(center) = &data.center {
        entries.floats("center", &rows, center);
    }
    for (name, column) in [("d_lse", &data.d_lse), ("d_entropy", &data.d_entropy), ("d_log_prob", &data.d_log_prob)] {
        if let Some(column) = column {
            entries.floats(name, &rows, column);
        }
    }
    if let Some(lengths) = &data.lengths {
        entries.integers("lengths", &[lengths.len()], lengths.iter().map(|&x| x as i64));
    }
    if let Some((queries, keys)) = &data.segments {
        entries.integers("segments_q", &[sizes.b, sizes.n], queries.iter().map(|&x| i64::from(x)));
        entries.integers("segments_k", &[sizes.b, sizes.m], keys.iter().map(|&x| i64::from(x)));
    }
    if let Some(bits) = &data.bits {
        entries.put("bits", "uint8", &bits.shape(), bits.data().to_vec());
    }
    if let Some(positions) = &data.positions {
        entries.integers("positions", &[sizes.b, sizes.n], positions.iter().copied());
    }
    if let Some((queries, keys)) = &data.buckets {
        entries.integers("buckets_q", &queries.shape(), queries.data().iter().map(|&x| i64::from(x)));
        entries.integers("buckets_k", &keys.shape(), keys.data().iter().map(|&x| i64::from(x)));
    }
}
