//! `qkv bench --device cuda`: attention on the first GPU, over the grid of the FlashAttention-3 paper, beside PyTorch where
//! it is asked for. Both sides are timed by the card's clock, call by call, with a cold cache, in turns.

use super::anchor::{Anchor, How};
use super::asked::{Asked, Form};
use super::case::{Case, Direction};
use super::progress::Progress;
use super::row::to_ten_nanoseconds;
use super::shape::Shape;
use super::statistics::{geometric_mean, median};
use super::table::{Column, Table, speed, time};
use crate::failure::Failure;
use crate::number::Precision;
use crate::say::Say;
use qkv::{Attention, Mask, Place};
use qkv_cuda::{Cuda, Dtype, Measured, Shapes, Uses};
use serde::Serialize;

/// A case that was measured, in the order in which it is told.
#[derive(Clone, Debug, Serialize)]
struct Row {
    shape: String,
    dtype: &'static str,
    causal: bool,
    direction: &'static str,
    /// Which kernel ran.
    kernel: String,
    best_ms: f64,
    median_ms: f64,
    /// Trillions of floating-point operations a second, at the median.
    tflops: f64,
    /// Billions of bytes of keys and values a second, for decoding.
    #[serde(skip_serializing_if = "Option::is_none")]
    gbs: Option<f64>,
    /// PyTorch's median.
    #[serde(skip_serializing_if = "Option::is_none")]
    torch_median_ms: Option<f64>,
    /// PyTorch's time over ours, the median over rounds.
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio: Option<f64>,
}

/// Every case of the grid, or those that were typed.
fn cases(asked: &Asked) -> Vec<Case> {
    let precisions = if asked.precisions.is_empty() { &[Precision::Bf16][..] } else { &asked.precisions };
    let directions = match (&asked.directions[..], asked.shapes.is_empty()) {
        ([], true) => &Direction::ALL[..],
        ([], false) => &[Direction::Forward],
        (typed, _) => typed,
    };
    let mut cases = Vec::new();
    for &precision in precisions {
        let case = |shape, causal, direction| Case { shape, precision, causal, direction };
        for &shape in &asked.shapes {
            cases.extend(directions.iter().map(|&direction| case(shape, asked.causal, direction)));
        }
        if !asked.shapes.is_empty() {
            continue;
        }
        for d in [64, 128, 256] {
            for &causal in if asked.causal { &[true][..] } else { &[false, true] } {
                for n in [512, 2048, 8192, 16_384] {
                    let (b, h) = (16_384 / n, 2048 / d);
                    let squares = directions.iter().filter(|&&direction| direction != Direction::Decode);
                    cases.extend(squares.map(|&direction| case(Shape::new([b, h, h, n, n, d]), causal, direction)));
                }
            }
        }
        if directions.contains(&Direction::Decode) {
            for [b, hk, m] in
                [[1, 32, 8192], [1, 8, 8192], [8, 8, 8192], [32, 8, 8192], [64, 8, 16_384], [1, 8, 131_072]]
            {
                cases.push(case(Shape::new([b, 32, hk, 1, m, 128]), asked.causal, Direction::Decode));
            }
        }
    }
    cases
}

/// Measures what was asked, and tells each case when it is measured.
pub(crate) fn measure(asked: &Asked, threads: usize, say: Say<'_>) -> Result<(), Failure> {
    let cuda = Cuda::new(0)?;
    let cases = cases(asked);
    let mut anchor = match &asked.against {
        Some((python, _)) => Some(Anchor::start_on(python, threads, "cuda")?),
        None => None,
    };
    let against = anchor.is_some();
    let widest = cases.iter().map(|case| case.shape.to_string().len()).max().unwrap_or(0);
    let mut columns = vec![
        Column::words("b,hq,hk,n,m,d", widest),
        Column::words("type", 4),
        Column::words("mask", 6),
        Column::words("direction", 9),
    ];
    columns.extend(["best ms", "median ms", "TFLOP/s", "GB/s"].map(Column::numbers));
    if against {
        columns.extend(["PyTorch ms", "ratio"].map(Column::numbers));
    }
    columns.push(Column::words("kernel", 20));
    let table = Table::new(columns, asked.form == Form::Markdown);
    let mut head = format!("qkv {}, {}", env!("CARGO_PKG_VERSION"), cuda.card().name);
    if let Some(anchor) = &anchor {
        head += &format!(", PyTorch {}", anchor.version());
    }
    if asked.form != Form::Json && !say(&format!("{head}\n\n{}", table.head()))? {
        return Ok(());
    }
    let progress = Progress::of(cases.len());
    let mut rows = Vec::new();
    for (at, &case) in cases.iter().enumerate() {
        progress.show(at, &case.to_string());
        let row = measure_case(asked, &cuda, case, &mut anchor)?;
        progress.clear();
        let told = match asked.form {
            Form::Json => serde_json::to_string(&row).expect("a row is plain data") + "\n",
            _ => table.row(&cells(&row, against)),
        };
        if !say(&told)? {
            return Ok(());
        }
        rows.push(row);
    }
    if asked.form == Form::Json || !against {
        return Ok(());
    }
    let mut end = String::from("\n");
    for direction in Direction::ALL {
        let ratios = rows.iter().filter(|row| row.direction == direction.name()).filter_map(|row| row.ratio);
        if let Some(mean) = geometric_mean(ratios) {
            end += &format!("{}: PyTorch's time over ours, geometric mean {mean:.2}\n", direction.name());
        }
    }
    say(&end).map(drop)
}

fn cells(row: &Row, against: bool) -> Vec<String> {
    let or_dash = |cell: Option<String>| cell.unwrap_or_else(|| "–".into());
    let mask = if row.causal { "causal" } else { "full" };
    let mut cells = vec![row.shape.clone(), row.dtype.into(), mask.into(), row.direction.into()];
    cells.extend([time(row.best_ms), time(row.median_ms), speed(row.tflops), or_dash(row.gbs.map(speed))]);
    if against {
        cells.extend([or_dash(row.torch_median_ms.map(time)), or_dash(row.ratio.map(|ratio| format!("{ratio:.2}")))]);
    }
    cells.push(row.kernel.clone());
    cells
}

/// One case: our side and PyTorch's in turns.
fn measure_case(asked: &Asked, cuda: &Cuda, case: Case, anchor: &mut Option<Anchor>) -> Result<Row, Failure> {
    let measured = prepare(cuda, case)?;
    if let Some(anchor) = anchor {
        anchor.prepare(case, How::Sdpa)?;
    }
    let rounds = asked.against.as_ref().map_or(1, |(_, rounds)| *rounds);
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        ours.push(measured.time(asked.seconds)?);
        if let Some(anchor) = anchor {
            theirs.push(anchor.measure(asked.seconds)?);
        }
    }
    let median_ms = median(ours.iter().map(|taken| taken.median_ms)).unwrap_or(f64::NAN);
    let ratio = median(theirs.iter().zip(&ours).map(|(theirs, ours)| theirs.median_ms / ours.median_ms));
    let plan = measured.plan();
    let kernel = match case.direction {
        Direction::Backward => plan.backward_kernel().unwrap_or_default(),
        _ => plan.forward_kernel(),
    };
    let digits = |x: f64| (x * 100.0).round() / 100.0;
    Ok(Row {
        shape: case.shape.to_string(),
        dtype: case.precision.name(),
        causal: case.causal,
        direction: case.direction.name(),
        kernel,
        best_ms: to_ten_nanoseconds(ours.iter().map(|taken| taken.best_ms).fold(f64::INFINITY, f64::min)),
        median_ms: to_ten_nanoseconds(median_ms),
        tflops: digits(case.flops() / median_ms / 1e9),
        gbs: (case.direction == Direction::Decode).then(|| digits(case.bytes() / median_ms / 1e6)),
        torch_median_ms: median(theirs.iter().map(|timing| timing.median_ms)).map(to_ten_nanoseconds),
        ratio: ratio.map(|ratio| (ratio * 1e4).round() / 1e4),
    })
}

fn prepare(cuda: &Cuda, case: Case) -> Result<Measured, Failure> {
    let Some(dtype) = Dtype::named(case.precision.name()) else {
        return Err(Failure::new(format!("`{}` is computed on the CPU alone", case.precision.name()))
            .hint("`--dtype bf16`, `f16` or `f32` goes with `--device cuda`"));
    };
    let attention = Attention::scaled_dot().mask(if case.causal { Mask::causal() } else { Mask::full() });
    let place = if case.direction == Direction::Decode { Place::End } else { Place::Start };
    let uses = Uses { backward: case.direction == Direction::Backward, ..Uses::default() };
    let shapes = Shapes { q: case.shape.queries(), k: case.shape.keys() };
    Ok(cuda.measured(&attention, dtype, shapes, place, uses)?)
}
