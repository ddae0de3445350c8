//! A picture as SVG, without scripts and external references. The same picture gives the same bytes.

use super::palette::Color;
use super::picture::Picture;
use super::sheet::{Anchor, Mark, Sheet};
use qkv_models::Result;
use std::fmt::{self, Write};

/// Font families in order of preference.
const FONTS: &str = "system-ui, 'Noto Sans', 'Noto Sans CJK SC', 'DejaVu Sans', sans-serif";

impl Picture {
    /// The picture as SVG.
    ///
    /// ```
    /// use qkv_explore::{Matrix, draw::Picture};
    /// let (rows, columns) = (vec!["hello".into()], vec!["你".into(), "好".into()]);
    /// let matrix = Matrix { rows, columns, weights: vec![vec![0.3, 0.7]] };
    /// let svg = Picture { title: Some("<3".into()), ..Picture::from(matrix) }.svg()?;
    /// assert!(svg.starts_with("<svg ") && svg.contains(">你</text>") && svg.contains(">&lt;3</text>"));
    /// # Ok::<(), qkv_models::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the matrix is empty, or does not have one weight per row and column.
    pub fn svg(&self) -> Result<String> {
        Ok(of_sheet(&Sheet::of(self)?, self.title.as_deref()))
    }
}

/// Renders a layout.
pub(super) fn of_sheet(sheet: &Sheet, title: Option<&str>) -> String {
    let mut svg = String::new();
    write(&mut svg, sheet, title).expect("writing to a string cannot fail");
    svg
}

fn write(svg: &mut String, sheet: &Sheet, title: Option<&str>) -> fmt::Result {
    let Sheet { width, height, .. } = sheet;
    writeln!(
        svg,
        r#"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" font-family="{FONTS}">"#
    )?;
    writeln!(svg, "<title>{}</title>", escaped(title.unwrap_or("attention weights")))?;
    writeln!(svg, r#"<rect width="{width}" height="{height}" fill="{}"/>"#, hex(sheet.paper))?;
    for mark in &sheet.marks {
        match mark {
            Mark::Box { x, y, width, height, color } => {
                let color = hex(*color);
                writeln!(
                    svg,
                    r#"<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{color}" shape-rendering="crispEdges"/>"#
                )?;
            }
            Mark::Cells { x, y, cell, gap, columns, levels } => {
                writeln!(svg, r#"<g transform="translate({x} {y})" shape-rendering="crispEdges">"#)?;
                cells(svg, *cell, *gap, *columns, levels, &sheet.colors)?;
                writeln!(svg, "</g>")?;
            }
            Mark::Text { x, y, size, anchor, turn, color, text } => {
                let anchor = match anchor {
                    Anchor::Start => "",
                    Anchor::Middle => r#" text-anchor="middle""#,
                    Anchor::End => r#" text-anchor="end""#,
                };
                let turn =
                    if *turn == 0.0 { String::new() } else { format!(r#" transform="rotate({turn} {x:.1} {y:.1})""#) };
                let (color, text) = (hex(*color), escaped(text));
                writeln!(
                    svg,
                    r#"<text x="{x:.1}" y="{y:.1}" font-size="{size:.1}" fill="{color}"{anchor}{turn}>{text}</text>"#
                )?;
            }
        }
    }
    writeln!(svg, "</svg>")
}

/// One path per color. Adjacent cells are merged where there is no gap.
fn cells(svg: &mut String, cell: f64, gap: f64, columns: usize, levels: &[u8], colors: &[Color; 256]) -> fmt::Result {
    let mut paths: Vec<String> = vec![String::new(); 256];
    let (side, columns) = (cell - gap, columns.max(1));
    for (row, line) in levels.chunks(columns).enumerate() {
        let mut at = 0;
        while at < line.len() {
            let level = line[at];
            let run = if gap > 0.0 { 1 } else { line[at..].iter().take_while(|&&other| other == level).count() };
            let width = cell * run as f64 - gap;
            write!(paths[usize::from(level)], "M{} {}h{width}v{side}h-{width}z", cell * at as f64, cell * row as f64)?;
            at += run;
        }
    }
    for (level, path) in paths.iter().enumerate().filter(|(_, path)| !path.is_empty()) {
        writeln!(svg, r#"<path fill="{}" d="{path}"/>"#, hex(colors[level]))?;
    }
    Ok(())
}

fn hex([r, g, b]: Color) -> String {
    format!("#{r:02x}{g:02x}{b:02x}")
}

/// Escapes markup and drops characters that XML does not allow.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in super::letters::sanitized(text).chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            c => escaped.push(c),
        }
    }
    escaped
}
