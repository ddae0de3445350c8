//! Layers and heads as aligned columns or as JSON.

use super::args::ShowArgs;
use super::selected::short_name;
use crate::failure::Failure;
use qkv_explore::Recording;
use qkv_explore::measures::{MEASURES, THRESHOLD, is_sampled, measure};
use serde_json::{Map, Value, json};

/// The layers of a model: names, heads and mechanism, and for a text the sizes.
pub(crate) fn layers(recording: &Recording, args: &ShowArgs) -> String {
    let sized = args.text.is_some();
    if args.json {
        let one = |at: usize| {
            let layer = &recording.layers[at];
            let mut object = json!({
                "layer": short_name(recording, at), "name": layer.name, "group": layer.group, "heads": layer.heads(),
                "computes": layer.description(),
            });
            if sized {
                object["size"] = json!(layer.size());
            }
            object
        };
        let layers: Vec<Value> = (0..recording.layers.len()).map(one).collect();
        return json!({ "layers": layers }).to_string() + "\n";
    }
    let mut head = vec!["layer", "name", "heads", "from", "to", "computes"];
    if sized {
        head.push("queries × keys");
    }
    let mut rows = vec![head.into_iter().map(String::from).collect::<Vec<_>>()];
    for (at, layer) in recording.layers.iter().enumerate() {
        let (from, to) = (recording.queries(at).name.clone(), recording.keys(at).name.clone());
        let mut row = vec![
            short_name(recording, at),
            layer.name.clone(),
            layer.heads().to_string(),
            from,
            to,
            layer.description(),
        ];
        if sized {
            let [n, m] = layer.size();
            row.push(format!("{n} × {m}"));
        }
        rows.push(row);
    }
    aligned(&rows, |column| column == 2)
}

/// The measures of every head.
pub(crate) fn heads(recording: &Recording, json: bool) -> Result<String, Failure> {
    let measured = measure(recording, THRESHOLD)?;
    if json {
        let one = |head: &qkv_explore::measures::HeadMeasures| {
            let mut object = Map::new();
            object.insert("layer".into(), short_name(recording, head.layer).into());
            object.insert("head".into(), head.head.into());
            object.extend(MEASURES.iter().zip(head.values).map(|(measure, value)| (measure.id.into(), json!(value))));
            Value::Object(object)
        };
        let heads: Vec<Value> = measured.iter().map(one).collect();
        let sampled = is_sampled(recording);
        let object = json!({ "text": recording.text, "output": recording.output, "sampled": sampled, "heads": heads });
        return Ok(object.to_string() + "\n");
    }
    let mut rows = vec![["layer", "head"].into_iter().chain(MEASURES.map(|m| m.id)).map(String::from).collect()];
    for head in &measured {
        let number = |value: Option<f64>| value.map_or("–".into(), |value| format!("{value:.4}"));
        let mut row = vec![short_name(recording, head.layer), head.head.to_string()];
        row.extend(head.values.map(number));
        rows.push(row);
    }
    let mut text = aligned(&rows, |column| column > 0);
    if is_sampled(recording) {
        text += "\nsampled: of a long input, evenly spaced queries were measured\n";
    }
    text.push('\n');
    for measure in MEASURES {
        let unit = if measure.unit.is_empty() { String::new() } else { format!(", in {}", measure.unit) };
        text += &format!("{:10}  {}{unit}\n", measure.id, measure.formula);
    }
    Ok(text)
}

/// Rows as columns of equal width; numbers are right-aligned.
fn aligned(rows: &[Vec<String>], right: impl Fn(usize) -> bool) -> String {
    let count = |word: &String| word.chars().count();
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |at: usize| rows.iter().filter_map(|row| row.get(at)).map(count).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().enumerate().map(|(at, word)| match right(at) {
            true => format!("{word:>0$}", widths[at]),
            false => format!("{word:<0$}", widths[at]),
        });
        text += cells.collect::<Vec<_>>().join("  ").trim_end();
        text.push('\n');
    }
    text
}
