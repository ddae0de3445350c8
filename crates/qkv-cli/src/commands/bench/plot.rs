//! Time and memory against length, and speed-up against threads, as an SVG with logarithmic axes. Colors follow the
//! reader's light or dark theme.

use std::fmt::{self, Write};

/// The time and memory of one engine at each length.
#[derive(Debug)]
pub(crate) struct Series {
    pub title: &'static str,
    pub ms: Vec<(usize, f64)>,
    pub bytes: Vec<(usize, f64)>,
}

/// The speed-up of one case for each number of threads.
#[derive(Debug)]
pub(crate) struct Curve {
    pub title: String,
    pub points: Vec<(usize, f64)>,
}

const WIDTH: f64 = 920.0;
const HEIGHT: f64 = 440.0;
const TOP: f64 = 118.0;
const BOTTOM: f64 = HEIGHT - 58.0;
const STYLE: &str = "\
.ground{fill:#ffffff}text{fill:#1f2933}.quiet{fill:#52606d}.grid{stroke:#e4e7eb}.axis{stroke:#9aa5b1}\
.line{fill:none;stroke-width:2.2;stroke-linejoin:round}.c2 .line{stroke-dasharray:7 4}\
.c0 .line{stroke:#2f6fde}.c0 .dot{fill:#2f6fde}.c1 .line{stroke:#d9822b}.c1 .dot{fill:#d9822b}\
.c2 .line{stroke:#b3336b}.c2 .dot{fill:#b3336b}.c3 .line{stroke:#2b8a6e}.c3 .dot{fill:#2b8a6e}\
.c4 .line{stroke:#7b5cc4}.c4 .dot{fill:#7b5cc4}.c5 .line{stroke:#8a7a2b}.c5 .dot{fill:#8a7a2b}\
.ideal .line{stroke:#9aa5b1;stroke-dasharray:2 4}.ideal .dot{fill:none}\
@media(prefers-color-scheme:dark){\
.ground{fill:#0d1117}text{fill:#e6edf3}.quiet{fill:#9da7b3}.grid{stroke:#2a313a}.axis{stroke:#6b7480}\
.c0 .line{stroke:#6ea0ff}.c0 .dot{fill:#6ea0ff}.c1 .line{stroke:#f0a35c}.c1 .dot{fill:#f0a35c}\
.c2 .line{stroke:#e884b0}.c2 .dot{fill:#e884b0}.c3 .line{stroke:#63c7a8}.c3 .dot{fill:#63c7a8}\
.c4 .line{stroke:#b39bf0}.c4 .dot{fill:#b39bf0}.c5 .line{stroke:#cbb95c}.c5 .dot{fill:#cbb95c}}";

/// The plot.
pub(crate) fn draw(lines: &[Series], about: &str) -> String {
    let mut svg = String::new();
    write(&mut svg, lines, about).expect("writing to a string cannot fail");
    svg
}

/// Up to this many curves of a speed-up plot, each has its own color and a name.
const NAMED: usize = 6;

/// The plot of speed-up against threads, beside the ideal up to `most` threads.
pub(crate) fn draw_scaling(curves: &[Curve], most: usize, about: &str) -> String {
    let mut svg = String::new();
    write_scaling(&mut svg, curves, most, about).expect("writing to a string cannot fail");
    svg
}

fn write_scaling(svg: &mut String, curves: &[Curve], most: usize, about: &str) -> fmt::Result {
    begin(svg, "Speed-up of attention against the number of threads", "Speed-up against threads", about)?;
    if curves.len() <= NAMED {
        for (at, curve) in curves.iter().enumerate() {
            sample(svg, at, [590.0, TOP + 8.0 + 24.0 * at as f64], &curve.title)?;
        }
    }
    let mut lines: Vec<Vec<(usize, f64)>> = curves.iter().map(|curve| curve.points.clone()).collect();
    lines.push(vec![(1, 1.0), (most, most as f64)]);
    let classes: Vec<String> =
        (0..curves.len()).map(|at| format!("c{}", if curves.len() <= NAMED { at } else { 0 })).collect();
    let classes: Vec<&str> = classes.iter().map(String::as_str).chain(["ideal"]).collect();
    let label = |x: f64| if x < 1.0 { format!("{x:.2} ×") } else { format!("{x:.0} ×") };
    Panel { left: 70.0, right: 560.0, title: "speed-up", below: "threads", step: 2.0, label }
        .write(svg, &lines, &classes)?;
    writeln!(svg, "</svg>")
}

/// The beginning of a plot: its title, and what it is about.
fn begin(svg: &mut String, title: &str, heading: &str, about: &str) -> fmt::Result {
    writeln!(
        svg,
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" font-size="13">
<title>{title}</title>
<style>{STYLE}</style>
<rect class="ground" width="{WIDTH}" height="{HEIGHT}"/>
<text x="70" y="30" font-size="16" font-weight="600">{heading}</text>
<text x="70" y="51" class="quiet">{about}</text>"#
    )
}

/// An entry of the legend.
fn sample(svg: &mut String, at: usize, [x, y]: [f64; 2], title: &str) -> fmt::Result {
    writeln!(
        svg,
        r#"<g class="c{at}"><line class="line" x1="{x:.0}" y1="{y:.0}" x2="{:.0}" y2="{y:.0}"/><circle class="dot" cx="{:.0}" cy="{y:.0}" r="3.5"/></g><text x="{:.0}" y="{:.1}">{title}</text>"#,
        x + 26.0,
        x + 13.0,
        x + 34.0,
        y + 4.5
    )
}

fn write(svg: &mut String, lines: &[Series], about: &str) -> fmt::Result {
    let title = "Time and memory of attention against the length of the sequence";
    begin(svg, title, "Time and memory against length", about)?;
    let mut x = 70.0;
    for (at, line) in lines.iter().enumerate() {
        sample(svg, at, [x, 75.0], line.title)?;
        x += 34.0 + 7.6 * line.title.chars().count() as f64 + 26.0;
    }
    let time = |line: &Series| line.ms.clone();
    let memory = |line: &Series| line.bytes.clone();
    let (below, classes) = ("length n", ["c0", "c1", "c2"]);
    Panel { left: 70.0, right: 440.0, title: "time of a forward call", below, step: 10.0, label: time_label }.write(
        svg,
        &lines.iter().map(time).collect::<Vec<_>>(),
        &classes,
    )?;
    Panel { left: 550.0, right: 895.0, title: "peak memory beyond the inputs", below, step: 4.0, label: memory_label }
        .write(svg, &lines.iter().map(memory).collect::<Vec<_>>(), &classes)?;
    writeln!(svg, "</svg>")
}

/// A diagram.
struct Panel {
    left: f64,
    right: f64,
    title: &'static str,
    /// The title of the axis of lengths or threads.
    below: &'static str,
    /// The factor between grid lines.
    step: f64,
    label: fn(f64) -> String,
}

impl Panel {
    /// Draws lines, each with a class of the style sheet.
    fn write(&self, svg: &mut String, lines: &[Vec<(usize, f64)>], classes: &[&str]) -> fmt::Result {
        let Panel { left, right, title, below, step, label } = *self;
        writeln!(svg, r#"<text x="{left}" y="{}" font-weight="600">{title}</text>"#, TOP - 14.0)?;
        let points = || lines.iter().flatten().filter(|(_, value)| *value > 0.0);
        let exponents = points().map(|(_, value)| value.ln() / step.ln());
        let (low, high) =
            exponents.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), e| (low.min(e), high.max(e)));
        let (Some(shortest), Some(longest)) = (points().map(|p| p.0).min(), points().map(|p| p.0).max()) else {
            return writeln!(svg, r#"<text x="{left}" y="{}" class="quiet">unknown</text>"#, TOP + 20.0);
        };
        // Whole steps around all points, and at least one.
        let (low, high) = (low.floor(), high.ceil().max(low.floor() + 1.0));
        let y = |value: f64| BOTTOM - (BOTTOM - TOP) * (value.ln() / step.ln() - low) / (high - low);
        let octaves = (longest as f64 / shortest as f64).log2().max(1.0);
        let x = |n: usize| left + (right - left) * (n as f64 / shortest as f64).log2() / octaves;
        for exponent in low as i32..=high as i32 {
            let (value, at) = (step.powi(exponent), y(step.powi(exponent)));
            writeln!(svg, r#"<line class="grid" x1="{left}" y1="{at:.1}" x2="{right}" y2="{at:.1}"/>"#)?;
            let text = label(value);
            writeln!(svg, r#"<text x="{}" y="{:.1}" text-anchor="end">{text}</text>"#, left - 8.0, at + 4.5)?;
        }
        let mut n = shortest;
        while n <= longest {
            let (at, under) = (x(n), BOTTOM + 20.0);
            writeln!(svg, r#"<line class="axis" x1="{at:.1}" y1="{BOTTOM}" x2="{at:.1}" y2="{}"/>"#, BOTTOM + 5.0)?;
            writeln!(svg, r#"<text x="{at:.1}" y="{under}" text-anchor="middle">{}</text>"#, length_label(n))?;
            n *= 2;
        }
        writeln!(svg, r#"<line class="axis" x1="{left}" y1="{BOTTOM}" x2="{right}" y2="{BOTTOM}"/>"#)?;
        let (middle, under) = ((left + right) / 2.0, BOTTOM + 42.0);
        writeln!(svg, r#"<text x="{middle}" y="{under}" text-anchor="middle" class="quiet">{below}</text>"#)?;
        // The first series last, so that it is on top.
        for (line, class) in lines.iter().zip(classes).rev() {
            let dots: Vec<(f64, f64)> =
                line.iter().filter(|(_, value)| *value > 0.0).map(|&(n, value)| (x(n), y(value))).collect();
            let path: Vec<String> = dots.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            writeln!(svg, r#"<g class="{class}"><polyline class="line" points="{}"/>"#, path.join(" "))?;
            for (x, y) in dots {
                writeln!(svg, r#"<circle class="dot" cx="{x:.1}" cy="{y:.1}" r="3.5"/>"#)?;
            }
            writeln!(svg, "</g>")?;
        }
        Ok(())
    }
}

fn time_label(ms: f64) -> String {
    match ms {
        ms if ms >= 999.0 => format!("{:.0} s", ms / 1e3),
        ms if ms >= 0.999 => format!("{ms:.0} ms"),
        ms => format!("{:.0} µs", ms * 1e3),
    }
}

fn memory_label(bytes: f64) -> String {
    match bytes.log2().round() {
        exponent @ 30.0.. => format!("{:.0} GiB", (exponent - 30.0).exp2()),
        exponent @ 20.0.. => format!("{:.0} MiB", (exponent - 20.0).exp2()),
        exponent @ 10.0.. => format!("{:.0} KiB", (exponent - 10.0).exp2()),
        exponent => format!("{:.0} B", exponent.exp2()),
    }
}

fn length_label(n: usize) -> String {
    if n >= 1024 && n.is_multiple_of(1024) { format!("{}k", n / 1024) } else { n.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_have_a_unit() {
        assert_eq!([0.01, 1.0, 100.0, 10_000.0].map(time_label), ["10 µs", "1 ms", "100 ms", "10 s"]);
        assert_eq!(
            [256.0, 65_536.0, 4_194_304.0, 4_294_967_296.0].map(memory_label),
            ["256 B", "64 KiB", "4 MiB", "4 GiB"]
        );
        assert_eq!([512, 1024, 32_768].map(length_label), ["512", "1k", "32k"]);
    }

    #[test]
    fn every_point_is_inside_its_panel() {
        let points = |scale: f64| (9..16).map(|e| (1 << e, scale * f64::from(1 << e))).collect::<Vec<_>>();
        let lines = [
            Series { title: "ours", ms: points(1e-3), bytes: points(64.0) },
            Series { title: "theirs", ms: points(7.0), bytes: vec![] },
        ];
        let svg = draw(&lines, "here");
        assert_eq!(svg.matches("<polyline").count(), 4);
        for y in svg.split("cy=\"").skip(3).map(|rest| rest.split('"').next().unwrap().parse::<f64>().unwrap()) {
            assert!((TOP..=BOTTOM).contains(&y), "{y}");
        }
    }

    #[test]
    fn a_curve_of_speed_up_is_named_unless_there_are_many() {
        let curve = |at: usize| Curve { title: format!("case {at}"), points: vec![(1, 1.0), (2, 1.9), (3, 2.5)] };
        let few = draw_scaling(&(0..6).map(curve).collect::<Vec<_>>(), 3, "here");
        assert!(few.contains("case 5") && few.matches("<polyline").count() == 7);
        let many = draw_scaling(&(0..7).map(curve).collect::<Vec<_>>(), 3, "here");
        assert!(!many.contains("case 5") && many.matches("<polyline").count() == 8);
    }

    #[test]
    fn without_points_a_panel_says_so() {
        let lines = [Series { title: "ours", ms: vec![(512, 1.0)], bytes: vec![] }];
        assert!(draw(&lines, "here").contains("unknown"));
    }
}
