//! The error of FAVOR+ (Performer) against the softmax attention that it estimates, by number of features. Prints a
//! table and draws `docs/favor-error.svg`: `cargo run --release -p figures --bin favor_error`.

use qkv::{Attention, Features, Inputs, Tensor};
use std::fmt::Write;

const LENGTH: usize = 512;
const WIDTH: usize = 32;
const SEEDS: u64 = 12;
const COUNTS: [usize; 9] = [16, 32, 64, 128, 256, 512, 1024, 2048, 4096];

/// Standard deviations of the scores `q·k/√d`, each with its color in the plot.
const SCORES: [(f64, &str); 3] = [(0.125, "#2f6fde"), (0.25, "#d9822b"), (0.5, "#b3336b")];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("n = {LENGTH}, d = {WIDTH}, mean of {SEEDS} seeds: ‖favor − softmax‖ / ‖softmax‖ of the output\n");
    println!("| features | scores of {} | of {} | of {} |", SCORES[0].0, SCORES[1].0, SCORES[2].0);
    println!("| ---: | ---: | ---: | ---: |");
    let mut rows = Vec::new();
    for count in COUNTS {
        let mut errors = [0.0; SCORES.len()];
        for (error, (size, _)) in errors.iter_mut().zip(SCORES) {
            *error = mean_error(count, size)?;
        }
        println!("| {count} | {:.3} | {:.3} | {:.3} |", errors[0], errors[1], errors[2]);
        rows.push((count, errors));
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/favor-error.svg");
    std::fs::write(path, draw(&rows)?)?;
    println!("\ndrawn to docs/favor-error.svg");
    Ok(())
}

/// The mean over seeds of the relative error with `count` features and scores of this standard deviation.
fn mean_error(count: usize, size: f64) -> qkv::Result<f64> {
    let [q, k, v] = [1, 2, 3].map(|seed| Tensor::<f32, 4>::randn([1, 1, LENGTH, WIDTH], seed));
    let [q, k] = [q, k].map(|t| t.map(|x| x * size.sqrt() as f32)); // q·k/√d of normal vectors has deviation 1
    let exact = Attention::scaled_dot().forward(Inputs::new(&q, &k, &v))?.values;
    let norm = |t: &mut dyn Iterator<Item = f32>| t.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    let mut sum = 0.0;
    for seed in 0..SEEDS {
        let favor = Attention::linear(Features::Favor { count, seed });
        let near = favor.forward(Inputs::new(&q, &k, &v))?.values;
        let apart = norm(&mut near.data().iter().zip(exact.data()).map(|(a, b)| a - b));
        sum += apart / norm(&mut exact.data().iter().copied());
    }
    Ok(sum / SEEDS as f64)
}

/// A log-log plot, with 1/√F for comparison.
fn draw(rows: &[(usize, [f64; SCORES.len()])]) -> Result<String, std::fmt::Error> {
    let (left, top, width, height) = (70.0, 60.0, 540.0, 300.0);
    let (bottom, right) = (top + height, left + width);
    let steps = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0];
    let all = || rows.iter().flat_map(|(_, errors)| errors.iter().copied());
    let (lowest, highest) = (all().fold(f64::INFINITY, f64::min), all().fold(0.0, f64::max));
    let low = steps.into_iter().rev().find(|&step| step <= lowest).unwrap_or(steps[0]);
    let high = steps.into_iter().find(|&step| step >= highest).unwrap_or(steps[steps.len() - 1]);
    let octaves = (COUNTS[COUNTS.len() - 1] as f64 / COUNTS[0] as f64).log2();
    let x = |count: usize| left + width * (count as f64 / COUNTS[0] as f64).log2() / octaves;
    let y = |error: f64| bottom - height * (error / low).log10() / (high / low).log10();

    let mut svg = String::new();
    writeln!(
        svg,
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 420" font-family="system-ui, sans-serif" font-size="13" fill="#1f2933">
<title>The error of FAVOR+ against softmax attention falls with the number of features</title>
<rect width="640" height="420" fill="#ffffff"/>
<text x="{left}" y="24" font-size="15" font-weight="600">FAVOR+ against softmax attention</text>
<text x="{left}" y="44" fill="#52606d">relative error of the output, n = {LENGTH}, d = {WIDTH}, mean of {SEEDS} seeds</text>"##
    )?;
    for step in steps.into_iter().filter(|&step| step >= low && step <= high) {
        let (at, label) = (y(step), left - 10.0);
        writeln!(svg, r##"<line x1="{left}" y1="{at:.1}" x2="{right}" y2="{at:.1}" stroke="#e4e7eb"/>"##)?;
        writeln!(svg, r##"<text x="{label}" y="{:.1}" text-anchor="end">{step}</text>"##, at + 4.5)?;
    }
    for &(count, _) in rows {
        let (at, under) = (x(count), bottom + 20.0);
        writeln!(svg, r##"<text x="{at:.1}" y="{under}" text-anchor="middle">{count}</text>"##)?;
    }
    writeln!(svg, r##"<text x="{}" y="{}" text-anchor="middle">features</text>"##, left + width / 2.0, bottom + 44.0)?;
    let line = |of: &dyn Fn(usize) -> f64| {
        let points = rows.iter().enumerate().map(|(at, &(count, _))| format!("{:.1},{:.1}", x(count), y(of(at))));
        points.collect::<Vec<_>>().join(" ")
    };
    // The rate at which the error of a mean of independent draws falls, through the last point of the first line.
    let (count, errors) = rows[rows.len() - 1];
    let rate = |at: usize| errors[0] * (count as f64 / rows[at].0 as f64).sqrt();
    writeln!(svg, r##"<polyline points="{}" fill="none" stroke="#9aa5b1" stroke-dasharray="5 4"/>"##, line(&rate))?;
    for (of, (_, color)) in SCORES.into_iter().enumerate() {
        let points = line(&|at| rows[at].1[of]);
        writeln!(svg, r##"<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>"##)?;
        for (count, errors) in rows {
            writeln!(svg, r##"<circle cx="{:.1}" cy="{:.1}" r="3.5" fill="{color}"/>"##, x(*count), y(errors[of]))?;
        }
    }
    // The legend, in the corner that falling lines leave free.
    let (from, to, text) = (left + 16.0, left + 44.0, left + 52.0);
    let mut at = bottom - 76.0;
    for (size, color) in SCORES.into_iter().rev() {
        writeln!(svg, r##"<line x1="{from}" y1="{at}" x2="{to}" y2="{at}" stroke="{color}" stroke-width="2"/>"##)?;
        writeln!(svg, r##"<text x="{text}" y="{}">scores q·k/√d of size {size}</text>"##, at + 4.5)?;
        at += 20.0;
    }
    writeln!(svg, r##"<line x1="{from}" y1="{at}" x2="{to}" y2="{at}" stroke="#9aa5b1" stroke-dasharray="5 4"/>"##)?;
    writeln!(svg, r##"<text x="{text}" y="{}">falling as 1/√features</text>"##, at + 4.5)?;
    writeln!(svg, "</svg>")?;
    Ok(svg)
}
