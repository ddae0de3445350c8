//! `qkv inspect`: the tensors of a checkpoint, and whether they fit the model.

use crate::arguments::{Argument, Arguments, Kind};
use crate::command::{Command, Run, Status};
use crate::failure::Failure;
use crate::input;
use crate::output::Print;
use qkv_models::Inspection;
use std::path::PathBuf;

pub(super) const COMMAND: Command =
    Command::new("inspect", "List the tensors of a checkpoint, and those that do not fit", ARGUMENTS, |matches| {
        Ok(Box::new(InspectArgs { path: matches.required_path("path"), json: matches.switch("json") }))
    })
    .examples(&[
        ("qkv inspect runs/shakespeare", "Names, shapes, types and parameters, and what does not fit"),
        ("qkv inspect SmolLM2-135M-Instruct.Q4_1.gguf --json", "As JSON"),
    ]);

const ARGUMENTS: Arguments = &[(
    "Checkpoint",
    &[
        Argument::new("path", Kind::Path, "Folder of a model, a `.safetensors` file or a `.gguf` file")
            .value("PATH")
            .positional()
            .required(),
        Argument::new("json", Kind::Switch, "Print one JSON object"),
    ],
)];

struct InspectArgs {
    path: PathBuf,
    json: bool,
}

impl Run for InspectArgs {
    fn run(&self, print: Print<'_>) -> Result<Status, Failure> {
        input::check(&self.path)?;
        let found = Inspection::of(&self.path)?;
        let text =
            if self.json { serde_json::to_string(&found).expect("plain data") + "\n" } else { found.to_string() };
        print(&text).map(|_| Status::Done)
    }
}
