//! Where the weights of a run come from: which tensors of a trained model are used, which the new task adds, and which
//! are left out.

use crate::files::weights::Weights;
use crate::layout::{Form, Layout, Mapped};
use crate::{Error, Result};
use qkv_nn::{Init, Param, Parameters};
use serde::Serialize;

/// The tensors a run starts with, under their names in the trained model's file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Provenance {
    /// Tensors read from the file.
    pub used: Vec<String>,
    /// Tensors that the task needs and the file lacks, initialized from the seed.
    pub added: Vec<String>,
    /// Tensors of the file that the task does not need.
    pub left_out: Vec<String>,
    /// Rows added to the vocabulary, for new tokens.
    pub new_rows: usize,
}

/// How many names are listed; the rest are only counted.
const LISTED: usize = 6;

impl Provenance {
    /// What was used, added and left out, a line each.
    pub fn lines(&self) -> Vec<String> {
        let listed = |names: &[String], what: &str| {
            let mut line = format!("{} {what}", names.len());
            if !names.is_empty() {
                line += ": ";
                line += &names[..names.len().min(LISTED)].join(", ");
            }
            if names.len() > LISTED {
                line += &format!(" and {} more", names.len() - LISTED);
            }
            line
        };
        let tensors = |count: usize| if count == 1 { "tensor" } else { "tensors" };
        let mut lines = vec![format!("{} {} used", self.used.len(), tensors(self.used.len()))];
        lines.push(listed(&self.added, "added"));
        lines.push(listed(&self.left_out, "left out"));
        if self.new_rows > 0 {
            lines.push(format!("{} rows added to the vocabulary", self.new_rows));
        }
        lines
    }
}

/// Standard deviation of added tensors, as in BERT.
const DEVIATION: f64 = 0.02;

impl Layout {
    /// Fills the parameters that the file has and initializes the others from the seed. Those that `fresh` selects are
    /// initialized in any case, such as a head for other labels. If a token embedding has fewer rows in the file, each
    /// new row is the mean of those.
    ///
    /// # Errors
    /// If a tensor has another shape, or the file has none of the model's; names the tensor or the file.
    pub fn fill_from(
        &self,
        parameters: &mut Parameters<f32>,
        weights: &Weights,
        fresh: impl Fn(&str) -> bool,
        seed: u64,
    ) -> Result<Provenance> {
        let mut found = Provenance::default();
        let prefix = self.prefix_in(weights);
        let mut used = std::collections::HashSet::new();
        for mapped in &self.tensors {
            let name = Layout::full(prefix, &mapped.name);
            let parts = self.parts(parameters, mapped)?;
            if mapped.parts.iter().any(|part| fresh(part)) || !weights.has(&name) {
                self.draw(parameters, &parts, mapped, seed)?;
                found.added.push(name);
                continue;
            }
            if let Some(rows) = vocabulary_rows(parameters, &parts, mapped, weights.shape(&name)) {
                let values = weights.read_shaped(&name, &[rows, parameters.shape(parts[0])[1]])?;
                let wanted = parameters.shape(parts[0])[0];
                fill_rows(parameters, parts[0], &values, wanted);
                found.new_rows = wanted - rows;
            } else {
                self.fill_one(parameters, weights, mapped, &name)?;
            }
            used.insert(name.clone());
            found.used.push(name);
        }
        if found.used.is_empty() {
            return Err(weights.wrong("", "none of its tensors belongs to such a model").into());
        }
        found.left_out = weights.names().into_iter().filter(|name| !used.contains(*name)).map(str::to_owned).collect();
        Ok(found)
    }

    /// Initializes the parameters of a tensor that the file lacks: matrices as BERT does, gains 1 and biases 0.
    fn draw(&self, parameters: &mut Parameters<f32>, parts: &[Param], mapped: &Mapped, seed: u64) -> Result<()> {
        for &part in parts {
            if parameters.shape(part).len() > 1 {
                parameters.redraw(part, Init::Normal(DEVIATION), seed);
            } else if parameters.get(part).is_empty() {
                return Err(Error::invalid(format!("tensor `{}` is empty", mapped.name)));
            }
        }
        Ok(())
    }
}

/// Parameters with a row for each token.
const TABLES: [&str; 5] =
    ["tokens.weight", "lm_head.weight", "shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"];

/// The rows of a vocabulary table in the file, if fewer than the model's.
fn vocabulary_rows(
    parameters: &Parameters<f32>,
    parts: &[Param],
    mapped: &Mapped,
    shape: Option<&[usize]>,
) -> Option<usize> {
    let is_table = mapped.form == Form::Plain && TABLES.contains(&&mapped.parts[0][..]);
    match (is_table, parameters.shape(parts[0]), shape?) {
        (true, &[wanted, width], &[rows, other]) if rows < wanted && width == other && rows > 0 => Some(rows),
        _ => None,
    }
}

/// Copies the rows of a table and sets the new ones to their mean.
fn fill_rows(parameters: &mut Parameters<f32>, table: Param, values: &[f32], wanted: usize) {
    let width = parameters.shape(table)[1];
    let rows = values.len() / width;
    let mut mean = vec![0.0f64; width];
    values.chunks_exact(width).for_each(|row| mean.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x)));
    let mean: Vec<f32> = mean.into_iter().map(|sum| (sum / rows as f64) as f32).collect();
    let to = parameters.get_mut(table);
    to[..values.len()].copy_from_slice(values);
    to[values.len()..wanted * width].chunks_exact_mut(width).for_each(|row| row.copy_from_slice(&mean));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::tensors::{NamedTensor, Storage, TensorFile, to_bytes};

    fn file(tensors: &[(&str, &[usize], Vec<f32>)]) -> Weights {
        let named: Vec<NamedTensor> =
            tensors.iter().map(|(name, shape, values)| NamedTensor { name, shape, values }).collect();
        Weights::File(TensorFile::from_bytes(to_bytes(&named, Storage::F32).unwrap(), "a.safetensors").unwrap())
    }

    #[test]
    fn tensors_are_used_added_or_left_out_and_new_tokens_start_at_the_mean() {
        let weights = file(&[
            ("bert.tokens.weight", &[2, 2], vec![1.0, 2.0, 3.0, 6.0]),
            ("bert.norm.weight", &[2], vec![4.0, 5.0]),
            ("head.weight", &[7, 2], vec![0.5; 14]),
        ]);
        let mut parameters = Parameters::new();
        let tokens = parameters.add("tokens.weight", &[3, 2], Init::Zeros, 1);
        let norm = parameters.add("norm.weight", &[2], Init::Ones, 1);
        let head = parameters.add("head.weight", &[4, 2], Init::Zeros, 1);
        let layout = Layout::own(&parameters);
        let found = layout.fill_from(&mut parameters, &weights, |name| name.starts_with("head."), 1).unwrap();
        assert_eq!(found.used, ["bert.tokens.weight", "bert.norm.weight"]);
        assert_eq!((&found.added[..], found.new_rows), (&["bert.head.weight".to_owned()][..], 1));
        assert_eq!(found.left_out, ["head.weight"]);
        assert_eq!(parameters.get(tokens), [1.0, 2.0, 3.0, 6.0, 2.0, 4.0]);
        assert_eq!(parameters.get(norm), [4.0, 5.0]);
        assert!(parameters.get(head).iter().any(|&x| x != 0.0));
        assert_eq!(found.lines()[0], "2 tensors used");
        let other = file(&[("tokens.weight", &[3, 2], vec![0.0; 6]), ("norm.weight", &[3], vec![0.0; 3])]);
        let error = layout.fill_from(&mut parameters, &other, |_| false, 1).unwrap_err().to_string();
        assert!(error.contains("`norm.weight`: its shape is [3], expected [2]"), "{error}");
        assert!(layout.fill_from(&mut parameters, &file(&[("x", &[1], vec![0.0])]), |_| false, 1).is_err());
    }
}
