//! Low-rank adapters as files in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`; a run keeps the
//! configuration and the tokenizer beside them. Modules have their names from `transformers`. Tensors that are trained
//! in full, such as a new head, are in the same file.

use crate::files::folder::{self, read_json, write_json};
use crate::files::tensors::{NamedTensor, Storage, TensorFile};
use crate::layout::{Form, Layout, Mapped};
use crate::{Error, Result};
use qkv_nn::{Adapter, Param, Parameters};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Settings of the adapters in a folder.
pub(crate) const ADAPTER_CONFIG: &str = "adapter_config.json";
/// Their tensors.
pub(crate) const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";
/// Prefix that PEFT gives the name of every tensor.
const PREFIX: &str = "base_model.model.";

/// Whether a folder holds adapters and not a whole model.
pub(crate) fn is_adapter(folder: &Path) -> bool {
    folder.join(ADAPTER_CONFIG).exists() && !folder.join(folder::WEIGHTS).exists()
}

/// Resolves a path and an optional adapter to a model and its adapters: a folder of adapters names its own model.
///
/// # Errors
/// If the model that the adapters name does not exist.
pub(crate) fn resolve(model: &Path, adapter: Option<&Path>) -> Result<(PathBuf, Option<PathBuf>)> {
    if adapter.is_some() || !is_adapter(model) {
        return Ok((model.to_owned(), adapter.map(Path::to_owned)));
    }
    let path = model.join(ADAPTER_CONFIG);
    let json: Value = read_json(&path)?;
    let base = json.get("base_model_name_or_path").and_then(Value::as_str).unwrap_or_default();
    if base.is_empty() || !Path::new(base).exists() {
        let what = format!("its model, `{base}`, is not there");
        return Err(Error::format(path, "field `base_model_name_or_path`", what));
    }
    Ok((base.into(), Some(model.to_owned())))
}

/// Writes the adapters of a model, and the tensors that are trained in full.
pub(crate) fn write(
    folder: &Path,
    parameters: &Parameters<f32>,
    layout: &Layout,
    base: &Path,
    task: &str,
) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(|e| Error::file("write", folder, e))?;
    let mut tensors: Vec<(String, Vec<usize>, Vec<f32>)> = Vec::new();
    let (mut modules, mut saved, mut ranks, mut alphas) = (Vec::new(), Vec::new(), Map::new(), Map::new());
    let mut usual: Option<(usize, f64, f64)> = None;
    for mapped in &layout.tensors {
        let name = Layout::full(layout.prefix, &mapped.name);
        let module = name.strip_suffix(".weight").or(name.strip_suffix(".bias")).unwrap_or(&name).to_owned();
        let parts = layout.parts(parameters, mapped)?;
        let adapters: Vec<Option<Adapter>> = parts.iter().map(|&part| parameters.adapter(part)).collect();
        let Some(first) = adapters.iter().flatten().next().copied() else {
            if parts.iter().all(|&part| parameters.is_trained(part)) {
                let (shape, values) = layout.tensor(parameters, mapped)?;
                tensors.push((format!("{PREFIX}{name}"), shape, values.into_owned()));
                if saved.last() != Some(&module) {
                    saved.push(module);
                }
            }
            continue;
        };
        let (a, b, rank) = stacked(parameters, &parts, &adapters);
        let alpha = first.scale * rank as f64;
        let (usual_rank, usual_alpha, _) = *usual.get_or_insert((rank, alpha, first.dropout));
        if (rank, alpha) != (usual_rank, usual_alpha) {
            ranks.insert(module.clone(), json!(rank));
            alphas.insert(module.clone(), json!(alpha));
        }
        let (inner, out) = (a.len() / rank, b.len() / rank);
        tensors.push((format!("{PREFIX}{module}.lora_A.weight"), vec![rank, inner], a));
        tensors.push((format!("{PREFIX}{module}.lora_B.weight"), vec![out, rank], b));
        modules.push(module);
    }
    let Some((rank, alpha, dropout)) = usual else { return Err(Error::invalid("the model has no adapters")) };
    let named: Vec<NamedTensor<'_>> =
        tensors.iter().map(|(name, shape, values)| NamedTensor { name, shape, values }).collect();
    crate::files::tensors::write(folder.join(ADAPTER_WEIGHTS), &named, Storage::F32)?;
    let transposed = layout.tensors.iter().any(|mapped| mapped.form == Form::Transposed);
    Ok(write_json(
        &folder.join(ADAPTER_CONFIG),
        &json!({
            "peft_type": "LORA",
            "task_type": task,
            "base_model_name_or_path": base.display().to_string(),
            "r": rank,
            "lora_alpha": alpha,
            "lora_dropout": dropout,
            "target_modules": targets(layout, &modules),
            "modules_to_save": if saved.is_empty() { Value::Null } else { json!(saved) },
            "rank_pattern": ranks,
            "alpha_pattern": alphas,
            "bias": "none",
            "fan_in_fan_out": transposed,
            "use_rslora": false,
            "use_dora": false,
            "init_lora_weights": true,
            "inference_mode": true,
        }),
    )?)
}

/// `A`, `B` and the total rank of the adapters of parts that are stacked in one tensor. `B` is block-diagonal, so each
/// part keeps its own product; the rows of a part without an adapter are zero.
fn stacked(parameters: &Parameters<f32>, parts: &[Param], adapters: &[Option<Adapter>]) -> (Vec<f32>, Vec<f32>, usize) {
    let rank_of = |adapter: &Adapter| parameters.shape(adapter.a)[0];
    let rank: usize = adapters.iter().flatten().map(rank_of).sum();
    let (mut a, mut b, mut before) = (Vec::new(), Vec::new(), 0);
    for (&part, adapter) in parts.iter().zip(adapters) {
        let rows = parameters.shape(part)[0];
        let Some(adapter) = adapter else {
            b.resize(b.len() + rows * rank, 0.0);
            continue;
        };
        let own = rank_of(adapter);
        a.extend_from_slice(parameters.get(adapter.a));
        for row in parameters.get(adapter.b).chunks_exact(own) {
            let start = b.len();
            b.resize(start + rank, 0.0);
            b[start + before..][..own].copy_from_slice(row);
        }
        before += own;
    }
    (a, b, rank)
}

/// `target_modules` by which PEFT finds exactly these modules: the last components of their names if every module with
/// such a name is adapted, full names otherwise.
fn targets(layout: &Layout, modules: &[String]) -> Vec<String> {
    let end = |module: &str| module.rsplit('.').next().unwrap_or(module).to_owned();
    let ends: std::collections::BTreeSet<String> = modules.iter().map(|module| end(module)).collect();
    let full = layout.tensors.iter().map(|mapped| Layout::full(layout.prefix, &mapped.name));
    let mut linear = full.filter_map(|name| name.strip_suffix(".weight").map(str::to_owned));
    match linear.all(|module| modules.contains(&module) || !ends.contains(&end(&module))) {
        true => ends.into_iter().collect(),
        false => modules.to_vec(),
    }
}

/// Reads adapters, attaches them to the matrices of a model, and fills the parameters whose tensors the file has in
/// full. Returns the names of those tensors.
///
/// # Errors
/// Names the file, and the field or tensor that is wrong or not supported.
pub(crate) fn read(folder: &Path, parameters: &mut Parameters<f32>, layout: &Layout) -> Result<Vec<String>> {
    let path = folder.join(ADAPTER_CONFIG);
    let json: Value = read_json(&path)?;
    let settings = Settings::new(&json, &path)?;
    let file = TensorFile::open(folder.join(ADAPTER_WEIGHTS))?;
    let wrong = |name: &str, what: &str| Error::format(file.path(), format!("tensor `{name}`"), what.to_owned());
    let mut pairs: BTreeMap<String, [Option<String>; 2]> = BTreeMap::new();
    let mut whole = Vec::new();
    for name in file.names() {
        let module = name.strip_prefix(PREFIX).ok_or_else(|| wrong(name, "its name does not start as PEFT's do"))?;
        let module = module.replace(".default.", ".");
        let side = [".lora_A.weight", ".lora_B.weight"].iter().position(|end| module.ends_with(end));
        match side {
            Some(side) => {
                let module = &module[..module.len() - ".lora_A.weight".len()];
                pairs.entry(module.to_owned()).or_default()[side] = Some(name.to_owned());
            }
            None if module.contains(".lora_") => {
                return Err(wrong(name, "adapters of this kind are not supported"));
            }
            None => {
                let module = module.replace(".modules_to_save.", ".");
                let mapped = find(layout, &module).ok_or_else(|| wrong(name, "the model has no such parameter"))?;
                layout.fill_values(parameters, mapped, |shape| Ok(file.read_shaped(name, shape)?))?;
                whole.push(module);
            }
        }
    }
    for (module, names) in pairs {
        let [Some(a), Some(b)] = names else {
            return Err(wrong(&format!("{PREFIX}{module}"), "it has one matrix of two"));
        };
        let mapped = find(layout, &format!("{module}.weight"))
            .filter(|mapped| !matches!(mapped.form, Form::Axes(_)))
            .ok_or_else(|| wrong(&a, "the model has no such matrix"))?;
        let parts = layout.parts(parameters, mapped)?;
        let inner = parameters.shape(parts[0])[1];
        let rank = file.shape(&a).and_then(|shape| shape.first().copied()).unwrap_or(0);
        let rows: usize = parts.iter().map(|&part| parameters.shape(part)[0]).sum();
        if rank == 0 || rank > 1 << 12 {
            return Err(wrong(&a, "its rank is not between 1 and 4096"));
        }
        let (left, right) = (file.read_shaped(&b, &[rows, rank])?, file.read_shaped(&a, &[rank, inner])?);
        let mut left = &left[..];
        for part in parts {
            if parameters.adapter(part).is_some() {
                return Err(wrong(&a, "the matrix has an adapter already"));
            }
            let adapter = parameters.adapt(part, rank, settings.scale(&module, rank), settings.dropout, 0);
            let (own, rest) = left.split_at(parameters.shape(part)[0] * rank);
            parameters.get_mut(adapter.a).copy_from_slice(&right);
            parameters.get_mut(adapter.b).copy_from_slice(own);
            left = rest;
        }
    }
    Ok(whole)
}

/// The tensor of a layout with this name in files, with or without the model's prefix.
fn find<'l>(layout: &'l Layout, name: &str) -> Option<&'l Mapped> {
    let same = |mapped: &&Mapped| {
        let full = Layout::full(layout.prefix, &mapped.name);
        full == name
            || mapped.name == name
            || name
                .strip_suffix(&mapped.name)
                .is_some_and(|start| ["transformer.", "model.", "bert.", "vit."].contains(&start))
    };
    layout.tensors.iter().find(same)
}

/// The fields of `adapter_config.json` that determine what adapters compute.
struct Settings<'j> {
    alpha: f64,
    alphas: Option<&'j Map<String, Value>>,
    stabilized: bool,
    dropout: f64,
}

impl<'j> Settings<'j> {
    fn new(json: &'j Value, path: &Path) -> Result<Settings<'j>> {
        let wrong = |name: &str, what: String| Error::format(path, format!("field `{name}`"), what);
        let kind = json.get("peft_type").and_then(Value::as_str).unwrap_or_default();
        if kind != "LORA" {
            return Err(wrong("peft_type", format!("it is `{kind}`, and only `LORA` is supported")));
        }
        if json.get("use_dora").and_then(Value::as_bool) == Some(true) {
            return Err(wrong("use_dora", "DoRA is not supported".into()));
        }
        let bias = json.get("bias").and_then(Value::as_str).unwrap_or("none");
        if bias != "none" {
            return Err(wrong("bias", format!("it is `{bias}`, and only `none` is supported")));
        }
        let number = |name: &str| json.get(name).and_then(Value::as_f64);
        let alpha = number("lora_alpha").filter(|alpha| alpha.is_finite());
        Ok(Settings {
            alpha: alpha.ok_or_else(|| wrong("lora_alpha", "it is no number".into()))?,
            alphas: json.get("alpha_pattern").and_then(Value::as_object),
            stabilized: json.get("use_rslora").and_then(Value::as_bool) == Some(true),
            dropout: number("lora_dropout").filter(|p| (0.0..1.0).contains(p)).unwrap_or(0.0),
        })
    }

    /// The scale of a module's adapter.
    fn scale(&self, module: &str, rank: usize) -> f64 {
        let own = self.alphas.into_iter().flatten().find(|(key, _)| {
            module.strip_suffix(key.as_str()).is_some_and(|start| start.is_empty() || start.ends_with('.'))
        });
        let alpha = own.and_then(|(_, alpha)| alpha.as_f64()).unwrap_or(self.alpha);
        let rank = rank as f64;
        alpha / if self.stabilized { rank.sqrt() } else { rank }
    }
}
