//! The YAML of settings: mappings and lists of plain values, one per line, nested by indentation. Other YAML (flow
//! collections, anchors, tags, block scalars) is refused.

use serde_json::{Map, Value};

/// The deepest nesting.
const DEEPEST: usize = 16;

/// A nonempty line: its number, its indentation and its text.
struct Line<'t> {
    number: usize,
    indent: usize,
    text: &'t str,
}

/// Parses settings; the error is a line number and what is wrong there. If a key occurs twice, its last value counts.
///
/// ```
/// let found = qkv_formats::files::yaml::parse("heads: 8\nlayers:\n- 2\n- 3\nmore:\n  glu: true # a gate\n").unwrap();
/// assert_eq!(found, serde_json::json!({ "heads": 8, "layers": [2, 3], "more": { "glu": true } }));
/// assert_eq!(qkv_formats::files::yaml::parse("a: [1]").unwrap_err().0, 1);
/// ```
///
/// # Errors
/// If the text is not such a mapping.
pub fn parse(text: &str) -> Result<Value, (usize, String)> {
    let mut lines = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let text = without_comment(line).trim_end();
        let start = text.trim_start_matches(' ');
        if start.is_empty() || (lines.is_empty() && start == "---") {
            continue;
        }
        if start.starts_with('\t') {
            return Err((at + 1, "it is indented by a tab".into()));
        }
        lines.push(Line { number: at + 1, indent: text.len() - start.len(), text: start });
    }
    let mut rest = &lines[..];
    let Some(first) = rest.first() else { return Ok(Value::Object(Map::new())) };
    let found = block(&mut rest, first.indent, 0)?;
    match rest.first() {
        Some(line) => Err((line.number, "its indentation fits nothing before it".into())),
        None if found.is_object() => Ok(found),
        None => Err((first.number, "it is a list, expected names with values".into())),
    }
}

/// A line up to its comment.
fn without_comment(line: &str) -> &str {
    let mut quote = None;
    for (at, c) in line.char_indices() {
        match (quote, c) {
            (None, '"' | '\'') => quote = Some(c),
            (Some(open), _) if open == c => quote = None,
            (None, '#') if at == 0 || line[..at].ends_with([' ', '\t']) => return &line[..at],
            _ => {}
        }
    }
    line
}

/// The mapping or list of the lines with this indentation.
fn block(rest: &mut &[Line<'_>], indent: usize, depth: usize) -> Result<Value, (usize, String)> {
    let is_item = |text: &str| text == "-" || text.starts_with("- ");
    let first = &rest[0];
    if depth > DEEPEST {
        return Err((first.number, format!("it is nested deeper than {DEEPEST}")));
    }
    if is_item(first.text) {
        let mut list = Vec::new();
        while let Some(line) = rest.first().filter(|line| line.indent == indent && is_item(line.text)) {
            list.push(scalar(line.text[1..].trim_start(), line.number)?);
            *rest = &rest[1..];
        }
        return Ok(Value::Array(list));
    }
    let mut map = Map::new();
    while let Some(line) = rest.first().filter(|line| line.indent == indent) {
        let split = line.text.split_once(": ").or_else(|| Some((line.text.strip_suffix(':')?, "")));
        let (key, value) = split.ok_or_else(|| (line.number, "it is no name with a value".to_owned()))?;
        let Value::String(key) = scalar(&format!("'{}'", key.trim_matches(['"', '\''])), line.number)? else {
            unreachable!("it is in quotes")
        };
        *rest = &rest[1..];
        let inner = rest.first().filter(|next| next.indent > indent || next.indent == indent && is_item(next.text));
        let value = match (value.trim(), inner.map(|next| next.indent)) {
            ("", Some(deeper)) => block(rest, deeper, depth + 1)?,
            (value, _) => scalar(value, line.number)?,
        };
        map.insert(key, value);
    }
    Ok(Value::Object(map))
}

/// A plain value.
fn scalar(text: &str, line: usize) -> Result<Value, (usize, String)> {
    for quote in ['"', '\''] {
        if let Some(inner) = text.strip_prefix(quote) {
            let inner = inner.strip_suffix(quote).filter(|inner| !inner.contains([quote, '\\']));
            return inner.map(|inner| Value::String(inner.to_owned())).ok_or((line, "its quotes do not match".into()));
        }
    }
    let is_nested = text.contains(": ") || text.ends_with(':');
    if is_nested || text.starts_with(['[', '{', '&', '*', '!', '|', '>', '%', '@', '`']) {
        return Err((line, format!("`{text}` is no plain value")));
    }
    let number = |text: &str| text.parse().ok().filter(|x: &f64| x.is_finite()).and_then(serde_json::Number::from_f64);
    Ok(match text {
        "" | "~" | "null" => Value::Null,
        "true" | "True" => Value::Bool(true),
        "false" | "False" => Value::Bool(false),
        _ => match (text.parse::<i64>(), number(text)) {
            (Ok(whole), _) => Value::from(whole),
            (_, Some(number)) => Value::Number(number),
            _ => Value::String(text.to_owned()),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn settings_are_names_with_values_lists_and_more_settings() {
        let text = "---\n# all\na: 1\nb: -2.5\nc: word # said\nd:\n  e: 'x: #y'\n  f:\n  - 3\n  - ~\ng:\na: 7\n";
        let expected = json!({ "a": 7, "b": -2.5, "c": "word", "d": { "e": "x: #y", "f": [3, null] }, "g": null });
        assert_eq!(parse(text).unwrap(), expected);
        assert_eq!(parse("").unwrap(), json!({}));
    }

    #[test]
    fn what_is_more_than_settings_is_refused_by_its_line() {
        for (text, line) in [
            ("a: 1\nb: {c: 1}", 2),
            ("a", 1),
            ("- 1", 1),
            ("a: 1\n  b: 2", 2),
            ("a: 1\n\tb: 2", 2),
            ("a: &x 1", 1),
            ("a: 'b", 1),
            ("a:\n- b: |", 2),
        ] {
            let found = parse(text);
            assert!(found.as_ref().is_err_and(|(at, _)| *at == line), "{text:?}: {found:?}");
        }
        let deep: String = (0..40).map(|at| format!("{}a:\n", " ".repeat(at))).collect();
        assert!(parse(&deep).unwrap_err().1.contains("deeper"));
    }
}
