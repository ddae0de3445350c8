//! What can go wrong between ranks.

/// The result of a call that other ranks take part in.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of a rank.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No library with MPI's standard ABI could be loaded.
    #[error("no MPI library with the standard ABI: {0}")]
    NoMpi(String),
    /// MPI refused a call.
    #[error("MPI refused `{call}`: {message}")]
    Mpi {
        /// The function.
        call: &'static str,
        /// What the library says.
        message: String,
    },
    /// Another rank ended or failed.
    #[error("rank {rank} is gone: {reason}")]
    Lost {
        /// The rank.
        rank: usize,
        /// What is known about it.
        reason: String,
    },
    /// A message has a different length than this rank expects: the ranks do not run the same program.
    #[error("rank {from} sent {found} bytes where {expected} were expected")]
    Length {
        /// The sender.
        from: usize,
        /// Bytes of the message.
        found: usize,
        /// Bytes that were expected.
        expected: usize,
    },
    /// The ranks differ in something that they have to agree on.
    #[error("the ranks have different {what}: `{first}` on rank {}, `{second}` on rank {}", ranks[0], ranks[1])]
    Disagreement {
        /// What has to be equal.
        what: String,
        /// Two ranks that differ.
        ranks: [usize; 2],
        /// What the first of them has.
        first: String,
        /// What the second of them has.
        second: String,
    },
    /// `qkv` rejected an attention.
    #[error(transparent)]
    Attention(#[from] qkv::Error),
    /// The call cannot be computed on these ranks.
    #[error("{0}")]
    Invalid(String),
}

impl Error {
    /// A way out, if there is one.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Error::NoMpi(_) => Some(
                "`pip install mpich` brings one with its `mpiexec`; MPICH 5, Intel MPI 2021.19 and Open MPI 6 have it; \
                 `QKV_MPI` names the file `libmpi_abi.so`",
            ),
            Error::Disagreement { .. } => Some("start the same program with the same files on every rank"),
            _ => None,
        }
    }
}
