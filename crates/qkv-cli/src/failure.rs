//! An expected failure: one sentence that says what and where, and a hint that says how to mend it. Misuse of the
//! command line is not one of these: `clap` words it, and it has its own exit code.

use std::fmt;
use std::path::Path;

/// What went wrong, as it is shown on stderr.
#[derive(Debug)]
pub(crate) struct Failure {
    message: String,
    hint: Option<String>,
}

impl Failure {
    /// With this sentence: names in backticks, no full stop.
    pub fn new(message: impl Into<String>) -> Failure {
        Failure { message: message.into(), hint: None }
    }

    /// About a file.
    pub fn in_file(path: &Path, message: impl fmt::Display) -> Failure {
        Failure::new(format!("`{}`: {message}", path.display()))
    }

    /// With a hint how to mend it.
    pub fn hint(mut self, hint: impl Into<String>) -> Failure {
        self.hint = Some(hint.into());
        self
    }

    /// What the library refused, with the file that the tensors came from.
    pub fn refused(error: &qkv::Error, path: Option<&Path>) -> Failure {
        let failure = match path {
            Some(path) => Failure::in_file(path, error),
            None => Failure::new(error.to_string()),
        };
        match hint(error, path.is_some()) {
            Some(hint) => failure.hint(hint),
            None => failure,
        }
    }
}

/// What a GPU refused, or what is missing for one.
impl From<qkv_cuda::Error> for Failure {
    fn from(error: qkv_cuda::Error) -> Failure {
        match &error {
            qkv_cuda::Error::Refused(refused) => Failure::refused(refused, None),
            qkv_cuda::Error::OnTheCpu { what, .. } => {
                Failure::new(format!("{what} runs on the CPU alone")).hint("leave out `--device cuda`")
            }
            _ => Failure { message: error.to_string(), hint: error.hint().map(Into::into) },
        }
    }
}

/// What the models' side refused: it names file and line itself, and often knows a way out.
impl From<qkv_models::Error> for Failure {
    fn from(error: qkv_models::Error) -> Failure {
        Failure { message: error.to_string(), hint: error.hint() }
    }
}

/// How to mend what the library refused, in words of the command line.
fn hint(error: &qkv::Error, from_file: bool) -> Option<String> {
    match error {
        qkv::Error::Missing { tensor: "center", .. } if from_file => {
            Some("put `center` into the file, a place among the keys for each query".into())
        }
        qkv::Error::Missing { tensor, .. } if from_file => {
            Some(format!("put `{tensor}` into the file, or choose another `--score`"))
        }
        qkv::Error::Missing { .. } => Some("the example has `q`, `k` and `v` alone; `--input FILE` brings more".into()),
        qkv::Error::Unused { tensor: "w", .. } => Some("`w` goes with `--score general`".into()),
        qkv::Error::Unused { tensor: "w_q" | "w_k" | "v_score", .. } => {
            Some("`w_q`, `w_k` and `v_score` go with `--score additive`".into())
        }
        qkv::Error::Unused { tensor: "scale", .. } => {
            Some("leave out either `--scale` or the tensor `scale`: each replaces the score's own scale".into())
        }
        qkv::Error::Unused { tensor: "center", .. } => Some("`center` goes with `--local predictive:D`".into()),
        qkv::Error::Unused { tensor: "d_log_prob", .. } => {
            Some("`d_log_prob` goes with `--select hard` and `--select sample`".into())
        }
        qkv::Error::Conflict { first: "a sink", .. } => {
            Some("leave out either the tensor `sinks` or `--select`".into())
        }
        qkv::Error::Conflict { first: "linear attention", second, .. } => {
            let tensor = match *second {
                "a bias" => "`bias` or `table`",
                "a mask of bits" => "`mask`",
                "a learned scale" => "`scale`",
                "sinks" => "`sinks`",
                _ => return None,
            };
            Some(format!("leave out either `--features` or the tensor {tensor}"))
        }
        qkv::Error::TooLarge { .. } => Some("a sequence at a time needs less memory".into()),
        _ => None,
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "error: {}", self.message)?;
        self.hint.as_ref().map_or(Ok(()), |hint| writeln!(f, "hint: {hint}"))
    }
}
