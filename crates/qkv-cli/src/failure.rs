//! An expected failure: one sentence that says what went wrong and where, and a hint at a way out. Wrong usage of the
//! command line is not one of these: it has its own exit code.

use std::fmt;
use std::path::Path;

/// A failure, as stderr shows it.
#[derive(Debug)]
pub(crate) struct Failure {
    message: String,
    hint: Option<String>,
}

impl Failure {
    /// A sentence: names in backticks, no full stop.
    pub fn new(message: impl Into<String>) -> Failure {
        Failure { message: message.into(), hint: None }
    }

    /// A failure that concerns a file.
    pub fn in_file(path: &Path, message: impl fmt::Display) -> Failure {
        Failure::new(format!("`{}`: {message}", path.display()))
    }

    /// Adds a hint.
    pub fn hint(mut self, hint: impl Into<String>) -> Failure {
        self.hint = Some(hint.into());
        self
    }

    /// Prefixes the location: `in.txt:3`.
    pub fn at(mut self, place: &str) -> Failure {
        self.message = format!("{place}: {}", self.message);
        self
    }

    /// The sentence without `error:` and hint.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// An attention call that the library refused, with the file that its tensors came from.
    pub fn refused(error: &qkv::Error, path: Option<&Path>) -> Failure {
        let failure = match path {
            // In a file, the mask bits are the tensor `mask`.
            Some(path) => Failure::in_file(path, error.to_string().replace("`bits`", "`mask`")),
            None => Failure::new(error.to_string()),
        };
        match hint(error, path.is_some()) {
            Some(hint) => failure.hint(hint),
            None => failure,
        }
    }
}

/// Calls that a GPU refuses, or that run on the CPU only.
impl From<qkv_cuda::Error> for Failure {
    fn from(error: qkv_cuda::Error) -> Failure {
        match &error {
            qkv_cuda::Error::Refused(refused) => Failure::refused(refused, None),
            qkv_cuda::Error::CpuOnly { what, .. } => {
                Failure::new(format!("{what} runs on the CPU only")).hint("leave out `--device cuda`")
            }
            _ => Failure { message: error.to_string(), hint: error.hint().map(Into::into) },
        }
    }
}

/// Ranks that disagree, or cannot be reached.
impl From<qkv_ranks::Error> for Failure {
    fn from(error: qkv_ranks::Error) -> Failure {
        Failure { message: error.to_string(), hint: error.hint().map(Into::into) }
    }
}

/// Errors of files already name file and line, and often have a hint.
impl From<qkv_formats::Error> for Failure {
    fn from(error: qkv_formats::Error) -> Failure {
        Failure { message: error.to_string(), hint: error.hint() }
    }
}

/// So do errors of models.
impl From<qkv_models::Error> for Failure {
    fn from(error: qkv_models::Error) -> Failure {
        Failure { message: error.to_string(), hint: error.hint() }
    }
}

/// A hint for an error of the library, in terms of the command line.
fn hint(error: &qkv::Error, from_file: bool) -> Option<String> {
    match error {
        qkv::Error::Missing { tensor: "center", .. } if from_file => {
            Some("add the tensor `center` to the file: the key that each query looks at".into())
        }
        qkv::Error::Missing { tensor, .. } if from_file => {
            Some(format!("add the tensor `{tensor}` to the file, or choose another `--score`"))
        }
        qkv::Error::Missing { .. } => {
            Some("the built-in example has only `q`, `k` and `v`; give more with `--input FILE`".into())
        }
        qkv::Error::Unused { tensor: "w", .. } => Some("`w` is for `--score general`".into()),
        qkv::Error::Unused { tensor: "w_q" | "w_k" | "v_score", .. } => {
            Some("`w_q`, `w_k` and `v_score` are for `--score additive`".into())
        }
        qkv::Error::Unused { tensor: "scale", .. } => {
            Some("leave out either `--scale` or the tensor `scale`: each replaces the score's own scale".into())
        }
        qkv::Error::Unused { tensor: "center", .. } => Some("`center` is for `--local predictive:D`".into()),
        qkv::Error::Unused { tensor: "d_log_prob", .. } => {
            Some("`d_log_prob` is for `--select hard` and `--select sample`".into())
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
        qkv::Error::TooLarge { .. } => Some("split the batch".into()),
        _ => None,
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "error: {}", self.message)?;
        self.hint.as_ref().map_or(Ok(()), |hint| writeln!(f, "hint: {hint}"))
    }
}
