//! Which parameters of a model are trained: all, the last layers, those that are not frozen, or low-rank adapters; and
//! the learning rate of each layer.

use super::trained_model::TrainedModel;
use crate::layout::Layout;
use crate::recipe::{Lora, Training};
use crate::{Error, Provenance, Recipe, Result};
use qkv_formats::numbers;
use qkv_nn::{HalfMatrix, Param, Parameters};
use qkv_simd::panels::PackedMatrix;
use qkv_simd::quantized::QuantizedMatrix;
use std::collections::{HashMap, HashSet};

/// Applies the recipe's `[lora]` and the settings of `[train]` that freeze parameters or lower their learning rates.
///
/// # Errors
/// If a pattern matches nothing, or nothing is left to train.
pub(super) fn apply(recipe: &Recipe, model: &mut TrainedModel, provenance: Option<&Provenance>) -> Result<()> {
    let names = Names::new(&model.layout(), provenance);
    let parameters = model.parameters_mut();
    if let Some(lora) = &recipe.lora {
        adapt(lora, parameters, &names, recipe.seed)?;
    }
    let Training { last_layers, freeze, layer_decay, .. } = &recipe.train;
    let depths = Depths::of(parameters);
    if (*last_layers > 0 || *layer_decay < 1.0) && depths.layers == 0 {
        return Err(Error::invalid("`train.last_layers` and `train.layer_decay` need a model that has layers"));
    }
    for param in parameters.all() {
        let name = parameters.name(param).to_owned();
        let depth = depths.depth(&name);
        let early = *last_layers > 0 && depth + last_layers < depths.layers + 1;
        if early && !names.is_added(&name) || freeze.iter().any(|pattern| names.freezes(pattern, &name)) {
            parameters.freeze(param);
        } else if parameters.is_trained(param) {
            parameters.set_rate(param, layer_decay.powi((depths.layers + 1 - depth) as i32));
        }
    }
    let all: Vec<String> = parameters.all().map(|param| parameters.name(param).to_owned()).collect();
    if let Some(pattern) = freeze.iter().find(|pattern| !all.iter().any(|name| names.freezes(pattern, name))) {
        return Err(Error::invalid(format!("`train.freeze` has `{pattern}`, and no parameter is called so"))
            .with_hint(
                "`embeddings` means those of tokens and positions; `qkv inspect` lists the tensors of a model",
            ));
    }
    if parameters.trained_count() == 0 {
        return Err(Error::invalid("everything is frozen: there is nothing to train"));
    }
    Ok(())
}

/// qkv's names of parameters and their names in files.
struct Names {
    in_file: HashMap<String, String>,
    /// Parameters of tensors that the file lacks.
    added: HashSet<String>,
}

impl Names {
    fn new(layout: &Layout, provenance: Option<&Provenance>) -> Names {
        let full = |name: &str| Layout::full(layout.prefix, name);
        let each = layout.tensors.iter().flat_map(|mapped| mapped.parts.iter().map(|part| (part, full(&mapped.name))));
        let in_file = each.map(|(part, name)| (part.clone(), name)).collect();
        let is_added =
            |name: &str| provenance.is_some_and(|found| found.added.iter().any(|added| added.ends_with(name)));
        let added = layout.tensors.iter().filter(|mapped| is_added(&mapped.name));
        Names { in_file, added: added.flat_map(|mapped| mapped.parts.clone()).collect() }
    }

    fn is_added(&self, name: &str) -> bool {
        self.added.contains(name)
    }

    /// Whether a pattern matches a matrix: the end of its name, qkv's or the file's, or all of it with `*`.
    fn matches(&self, pattern: &str, name: &str) -> bool {
        let names = [Some(name), self.in_file.get(name).map(String::as_str)];
        names.into_iter().flatten().any(|name| {
            let module = name.strip_suffix(".weight").or(name.strip_suffix(".bias")).unwrap_or(name);
            [name, module].into_iter().any(|name| {
                let ends = name.strip_suffix(pattern).is_some_and(|start| start.is_empty() || start.ends_with('.'));
                ends || pattern.contains('*') && wild(pattern, name)
            })
        })
    }

    /// Whether a pattern of `freeze` matches a parameter. `embeddings` are those of tokens, positions, segments and
    /// patches, with their norm.
    fn freezes(&self, pattern: &str, name: &str) -> bool {
        pattern == "embeddings" && is_embedding(name) || self.matches(pattern, name)
    }
}

/// Prefixes of the names of embeddings: of tokens, positions, segments and patches, with their norm.
const EMBEDDINGS: [&str; 9] = [
    "tokens.",
    "segments.",
    "embed_norm.",
    "shared.",
    "encoder.embed_tokens.",
    "decoder.embed_tokens.",
    "patches.",
    "class_token",
    "positions.",
];

fn is_embedding(name: &str) -> bool {
    EMBEDDINGS.iter().any(|start| name.starts_with(start))
}

/// Whether a name matches a pattern in which `*` stands for any characters.
fn wild(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((start, rest)) => {
            let Some(after) = name.strip_prefix(start) else { return false };
            (0..=after.len()).any(|at| after.is_char_boundary(at) && wild(rest, &after[at..]))
        }
    }
}

/// The depth of each parameter: 0 for embeddings, then the layers, then the head and the final norm.
struct Depths {
    layers: usize,
    encoder_layers: usize,
}

/// The layer of a parameter: whether it is in the decoder, and its number.
fn layer(name: &str) -> Option<(bool, usize)> {
    let (stack, rest) = match name.split_once("layers.")? {
        ("", rest) => (false, rest),
        ("encoder.", rest) => (false, rest),
        ("decoder.", rest) => (true, rest),
        _ => return None,
    };
    Some((stack, rest.split('.').next()?.parse().ok()?))
}

impl Depths {
    fn of(parameters: &Parameters<f32>) -> Depths {
        let count = |decoder: bool| {
            let found = parameters.all().filter_map(|param| layer(parameters.name(param)));
            found.filter(|(stack, _)| *stack == decoder).map(|(_, layer)| layer + 1).max().unwrap_or(0)
        };
        let (encoder_layers, decoder_layers) = (count(false), count(true));
        Depths { layers: encoder_layers + decoder_layers, encoder_layers }
    }

    fn depth(&self, name: &str) -> usize {
        match layer(name) {
            Some((false, layer)) => layer + 1,
            Some((true, layer)) => self.encoder_layers + layer + 1,
            None if is_embedding(name) => 0,
            None => self.layers + 1,
        }
    }
}

/// Whether a parameter is a projection matrix of a layer: these can have adapters.
fn is_projection(parameters: &Parameters<f32>, param: Param) -> bool {
    let name = parameters.name(param);
    let part = name.strip_suffix(".weight").and_then(|name| name.rsplit('.').next()).unwrap_or("");
    let known = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2", "gate"].contains(&part);
    known && layer(name).is_some() && parameters.shape(param).len() == 2
}

/// Freezes all but added tensors, and adds adapters to the matrices that the recipe names.
fn adapt(lora: &Lora, parameters: &mut Parameters<f32>, names: &Names, seed: u64) -> Result<()> {
    let projections: Vec<Param> = parameters.all().filter(|&param| is_projection(parameters, param)).collect();
    let all = lora.targets.iter().any(|target| target == "all-linear");
    let named = |parameters: &Parameters<f32>, target: &str| -> Vec<Param> {
        let matches = |param: &&Param| names.matches(target, parameters.name(**param));
        projections.iter().filter(matches).copied().collect()
    };
    let mut chosen: HashSet<Param> = HashSet::new();
    for target in lora.targets.iter().filter(|_| !all) {
        let found = named(parameters, target);
        if found.is_empty() {
            return Err(Error::invalid(format!(
                "`lora.targets` has `{target}`, and no matrix of a layer is called so"
            ))
            .with_hint("`q_proj`, `k_proj`, `v_proj`, `out_proj`, `fc1`, `fc2`, `gate` are names in every model"));
        }
        chosen.extend(found);
    }
    let every: Vec<Param> = parameters.all().collect();
    for &param in &every {
        if !names.is_added(parameters.name(param)) {
            parameters.freeze(param);
        }
    }
    for &param in projections.iter().filter(|param| all || chosen.contains(param)) {
        let &[out, inner] = parameters.shape(param) else { continue };
        if lora.rank > out.min(inner) {
            let name = parameters.name(param);
            let what = format!("`lora.rank` is {}, `{name}` is {out} × {inner}", lora.rank);
            return Err(Error::invalid(what).with_hint("a rank is lower than both sides of the matrix"));
        }
        parameters.adapt(param, lora.rank, lora.alpha / lora.rank as f64, lora.dropout, seed);
    }
    for &param in &projections {
        if parameters.is_trained(param) {
            continue;
        }
        match lora.bits {
            Some(bits @ (4 | 8)) if !parameters.has_quantized(param) => quantize(parameters, param, bits)?,
            Some(16) if !parameters.has_stored(param) => {
                let values = numbers::to_bf16(parameters.get(param));
                let packed = PackedMatrix::new(&values, parameters.shape(param)[1]);
                parameters.set_half(param, HalfMatrix::Bf16(packed));
            }
            _ => {}
        }
        // Without `bits`, matrices that the file stores in fewer than 32 bits stay as they are.
        parameters.keep_stored(param);
    }
    Ok(())
}

/// Quantizes a matrix to blocks of `bits` bits.
fn quantize(parameters: &mut Parameters<f32>, param: Param, bits: u32) -> Result<()> {
    let (width, values) = (parameters.shape(param)[1], parameters.get(param));
    let rounded = match bits {
        4 => QuantizedMatrix::rounded4(width, values),
        _ => QuantizedMatrix::rounded8(width, values),
    };
    let Some(rounded) = rounded else {
        let name = parameters.name(param);
        let what = format!("`lora.bits` is {bits}: rows of `{name}` have {width} elements");
        return Err(Error::invalid(what).with_hint("blocks need a multiple of 32"));
    };
    parameters.set_quantized(param, rounded);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_stand_for_anything() {
        for (pattern, name, same) in [
            ("layers.*.fc1", "layers.3.fc1", true),
            ("*.q_proj", "layers.0.self_attn.q_proj", true),
            ("layers.1*", "layers.12.fc1.weight", true),
            ("*", "", true),
            ("a*b*c", "aXbYc", true),
            ("a*b*c", "aXcYb", false),
            ("layers.*.fc1", "layers.3.fc2", false),
        ] {
            assert_eq!(wild(pattern, name), same, "{pattern} {name}");
        }
    }

    #[test]
    fn depths_go_from_embeddings_to_the_head() {
        let mut parameters = Parameters::new();
        for name in ["tokens.weight", "encoder.layers.1.fc1.weight", "decoder.layers.0.fc1.weight", "norm.weight"] {
            parameters.add(name, &[1, 1], qkv_nn::Init::Zeros, 1);
        }
        let depths = Depths::of(&parameters);
        let found: Vec<usize> = parameters.all().map(|param| depths.depth(parameters.name(param))).collect();
        assert_eq!((depths.layers, found), (3, vec![0, 2, 3, 4]));
    }
}
