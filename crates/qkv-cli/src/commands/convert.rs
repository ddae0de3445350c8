//! `qkv convert`: writes a model as a folder in the Hugging Face layout.

use crate::arguments::{Argument, Arguments, Kind};
use crate::command::{Command, Run, Status};
use crate::failure::Failure;
use crate::input;
use crate::output::Print;
use qkv_models::files::tensors::Storage;
use qkv_models::{Describer, Detector, Encoder, Generator, Han, Recognizer, Speaker, Translator, Vit, Vqa};
use std::fs;
use std::path::{Path, PathBuf};

pub(super) const COMMAND: Command =
    Command::new("convert", "Convert a model to a folder that Python's `transformers` reads", ARGUMENTS, |matches| {
        Ok(Box::new(ConvertArgs {
            path: matches.required_path("path"),
            adapter: matches.path("adapter"),
            out: matches.required_path("out"),
            storage: match matches.word("storage") {
                Some("f16") => Storage::F16,
                Some("bf16") => Storage::Bf16,
                Some("int8") => Storage::Rows8,
                _ => Storage::F32,
            },
        }))
    })
    .examples(&[
        ("qkv convert SmolLM2-135M-Instruct.Q4_1.gguf --out smollm2", "From GGUF to safetensors"),
        ("qkv convert smollm2 --adapter runs/chat-lora --out merged", "With low-rank adapters merged into it"),
        ("qkv convert runs/zh-en --out small --storage int8", "A quarter of the size, readable only by `qkv`"),
    ]);

const ARGUMENTS: Arguments = &[(
    "Input and output",
    &[
        Argument::new("path", Kind::Path, "Model: a folder, a `.gguf` file, or Whisper as CTranslate2 or ggml")
            .value("PATH")
            .positional()
            .required(),
        Argument::new("adapter", Kind::Path, "Folder of low-rank adapters (LoRA), in PEFT's format, to merge")
            .value("DIR"),
        Argument::new("out", Kind::Path, "Folder to create").value("DIR").required(),
        Argument::new("storage", Kind::Word, "Type of the stored weights").default("f32").values(&[
            ("f32", "as computed"),
            ("f16", "IEEE half precision"),
            ("bf16", "bfloat16"),
            ("int8", "matrices in 8 bits with a scale for each row; only `qkv` reads them"),
        ]),
    ],
)];

struct ConvertArgs {
    path: PathBuf,
    adapter: Option<PathBuf>,
    out: PathBuf,
    storage: Storage,
}

impl Run for ConvertArgs {
    fn run(&self, print: Print<'_>) -> Result<Status, Failure> {
        if fs::read_dir(&self.out).is_ok_and(|mut entries| entries.next().is_some()) {
            let what = format!("`{}` already exists and is not empty", self.out.display());
            return Err(Failure::new(what).hint("choose another `--out`"));
        }
        input::check(&self.path)?;
        // All or nothing: a failure, as on a full disk, must not block a second try.
        let part = Part::beside(&self.out)?;
        self.save(&part.0)?;
        let _ = fs::remove_dir(&self.out); // an empty folder may be replaced
        fs::rename(&part.0, &self.out).map_err(|error| qkv_models::Error::file("write", &self.out, error))?;
        print(&format!("written  {}\n", self.out.display())).map(|_| Status::Done)
    }
}

impl ConvertArgs {
    fn save(&self, folder: &Path) -> Result<(), Failure> {
        if Recognizer::is_at(&self.path) {
            return Ok(Recognizer::open(&self.path)?.save(folder, self.storage)?);
        }
        let adapter = self.adapter.as_deref();
        let kind = if self.path.is_dir() { qkv_models::kind(&self.path)? } else { String::new() };
        match kind.as_str() {
            "encoder" => {
                let mut encoder = Encoder::open_with(&self.path, adapter)?;
                encoder.merge();
                encoder.save(folder, self.storage)?;
            }
            kind @ ("han" | "vit" | "describe" | "vqa" | "detect" | "voice" | "transformer" | "recurrent")
                if adapter.is_some() =>
            {
                return Err(Failure::new(format!("`--adapter` is not supported for a `{kind}`")));
            }
            "han" => Han::open(&self.path)?.save(folder, self.storage)?,
            "vit" => Vit::open(&self.path)?.save(folder, self.storage)?,
            "describe" => Describer::open(&self.path)?.save(folder, self.storage)?,
            "vqa" => Vqa::open(&self.path)?.save(folder, self.storage)?,
            "detect" => Detector::open(&self.path)?.save(folder, self.storage)?,
            "voice" => Speaker::open(&self.path)?.save(folder, self.storage)?,
            "transformer" | "recurrent" => Translator::open(&self.path)?.save(folder, self.storage)?,
            _ => {
                let mut generator = Generator::open_with(&self.path, adapter)?;
                generator.merge();
                generator.save(folder, self.storage)?;
            }
        }
        Ok(())
    }
}

/// A folder that is filled before it gets its final name. Removed when dropped, if it still exists.
struct Part(PathBuf);

impl Part {
    fn beside(path: &Path) -> Result<Part, Failure> {
        let name = path.file_name().ok_or_else(|| Failure::in_file(path, "cannot be written: it has no name"))?;
        Ok(Part(path.with_file_name(format!(".{}.{}.part", name.to_string_lossy(), std::process::id()))))
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
