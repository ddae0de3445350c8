//! `qkv bench --device cuda`: attention on the first GPU over the grid of the FlashAttention-3 paper, optionally
//! against PyTorch. Both sides are timed by the device's clock, call by call, with a cold cache, in alternating rounds.

use super::args::{BenchArgs, ReportFormat};
use super::case::{Case, Direction};
use super::measurement::to_ten_nanoseconds;
use super::progress::Progress;
use super::shape::Shape;
use super::statistics::{geometric_mean, median};
use super::table::{Column, Table, speed, time};
use super::torch::{TorchKernel, TorchProcess};
use crate::dtype::Precision;
use crate::failure::Failure;
use crate::output::Print;
use qkv::{Attention, Mask, Place};
use qkv_cuda::{Benchmark, Cuda, Dtype, PlanOptions};
use serde::Serialize;

/// A measured case, in the order of the JSON.
#[derive(Clone, Debug, Serialize)]
struct DeviceMeasurement {
    shape: String,
    dtype: &'static str,
    causal: bool,
    direction: &'static str,
    /// The name of the kernel.
    kernel: String,
    best_ms: f64,
    median_ms: f64,
    /// At the median.
    tflops: f64,
    /// GB/s of keys and values, for decoding.
    #[serde(skip_serializing_if = "Option::is_none")]
    gbs: Option<f64>,
    /// PyTorch's median.
    #[serde(skip_serializing_if = "Option::is_none")]
    torch_median_ms: Option<f64>,
    /// PyTorch's time over ours, median over rounds.
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio: Option<f64>,
}

/// The grid, or the typed cases.
fn cases(args: &BenchArgs) -> Vec<Case> {
    let precisions = if args.precisions.is_empty() { &[Precision::Bf16][..] } else { &args.precisions };
    let directions = match (&args.directions[..], args.shapes.is_empty()) {
        ([], true) => &Direction::ALL[..],
        ([], false) => &[Direction::Forward],
        (typed, _) => typed,
    };
    let mut cases = Vec::new();
    for &precision in precisions {
        let case = |shape, causal, direction| Case { shape, precision, causal, direction };
        for &shape in &args.shapes {
            cases.extend(directions.iter().map(|&direction| case(shape, args.causal, direction)));
        }
        if !args.shapes.is_empty() {
            continue;
        }
        for d in [64, 128, 256] {
            for &causal in if args.causal { &[true][..] } else { &[false, true] } {
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
                cases.push(case(Shape::new([b, 32, hk, 1, m, 128]), args.causal, Direction::Decode));
            }
        }
    }
    cases
}

/// Measures every case, and prints each as soon as it is measured.
pub(crate) fn measure(args: &BenchArgs, threads: usize, print: Print<'_>) -> Result<(), Failure> {
    let cuda = Cuda::new(0)?;
    let cases = cases(args);
    let mut torch = match &args.against {
        Some((python, _)) => Some(TorchProcess::start_on(python, threads, "cuda")?),
        None => None,
    };
    let against = torch.is_some();
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
    let table = Table::new(columns, args.format == ReportFormat::Markdown);
    let mut header = format!("qkv {}, {}", env!("CARGO_PKG_VERSION"), cuda.device().name);
    if let Some(torch) = &torch {
        header += &format!(", PyTorch {}", torch.version());
    }
    if args.format != ReportFormat::Json && !print(&format!("{header}\n\n{}", table.header()))? {
        return Ok(());
    }
    let progress = Progress::of(cases.len());
    let mut rows = Vec::new();
    for (at, &case) in cases.iter().enumerate() {
        progress.show(at, &case.to_string());
        let row = measure_case(args, &cuda, case, &mut torch)?;
        progress.clear();
        let text = match args.format {
            ReportFormat::Json => serde_json::to_string(&row).expect("a row is plain data") + "\n",
            _ => table.row(&cells(&row, against)),
        };
        if !print(&text)? {
            return Ok(());
        }
        rows.push(row);
    }
    if args.format == ReportFormat::Json || !against {
        return Ok(());
    }
    let mut end = String::from("\n");
    for direction in Direction::ALL {
        let ratios = rows.iter().filter(|row| row.direction == direction.name()).filter_map(|row| row.ratio);
        if let Some(mean) = geometric_mean(ratios) {
            end += &format!("{}: PyTorch's time over ours, geometric mean {mean:.2}\n", direction.name());
        }
    }
    print(&end).map(drop)
}

fn cells(row: &DeviceMeasurement, against: bool) -> Vec<String> {
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

/// One case: ours and PyTorch in alternating rounds.
fn measure_case(
    args: &BenchArgs,
    cuda: &Cuda,
    case: Case,
    torch: &mut Option<TorchProcess>,
) -> Result<DeviceMeasurement, Failure> {
    let measured = prepare(cuda, case)?;
    if let Some(torch) = torch {
        torch.prepare(case, TorchKernel::Sdpa)?;
    }
    let rounds = args.rounds();
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        ours.push(measured.time(args.seconds)?);
        if let Some(torch) = torch {
            theirs.push(torch.measure(args.seconds)?);
        }
    }
    let median_ms = median(ours.iter().map(|timing| timing.median_ms)).unwrap_or(f64::NAN);
    let ratio = median(theirs.iter().zip(&ours).map(|(theirs, ours)| theirs.median_ms / ours.median_ms));
    let plan = measured.plan();
    let kernel = match case.direction {
        Direction::Backward => plan.backward_kernel().unwrap_or_default(),
        _ => plan.forward_kernel(),
    };
    let digits = |x: f64| (x * 100.0).round() / 100.0;
    Ok(DeviceMeasurement {
        shape: case.shape.to_string(),
        dtype: case.precision.name(),
        causal: case.causal,
        direction: case.direction.name(),
        kernel,
        best_ms: to_ten_nanoseconds(ours.iter().map(|timing| timing.best_ms).fold(f64::INFINITY, f64::min)),
        median_ms: to_ten_nanoseconds(median_ms),
        tflops: digits(case.flops() / median_ms / 1e9),
        gbs: (case.direction == Direction::Decode).then(|| digits(case.bytes() / median_ms / 1e6)),
        torch_median_ms: median(theirs.iter().map(|timing| timing.median_ms)).map(to_ten_nanoseconds),
        ratio: ratio.map(|ratio| (ratio * 1e4).round() / 1e4),
    })
}

fn prepare(cuda: &Cuda, case: Case) -> Result<Benchmark, Failure> {
    let Some(dtype) = Dtype::named(case.precision.name()) else {
        return Err(Failure::new(format!("`{}` is computed on the CPU only", case.precision.name()))
            .hint("use `--dtype bf16`, `f16` or `f32` with `--device cuda`"));
    };
    let attention = Attention::scaled_dot().mask(if case.causal { Mask::causal() } else { Mask::full() });
    let place = if case.direction == Direction::Decode { Place::End } else { Place::Start };
    let options = PlanOptions::default().backward(case.direction == Direction::Backward);
    Ok(cuda.benchmark(&attention, dtype, [case.shape.queries(), case.shape.keys()], place, options)?)
}
