#![doc = include_str!("../README.md")]
//!
//! | module | owns |
//! | --- | --- |
//! | `transport` | messages between ranks: the trait, and pending messages |
//! | `in_process` | ranks that are threads of one process, for tests of the algorithms |
//! | `mpi` | MPI through its standard ABI, loaded at run time: all unsafe code |
//! | `launch` | whether a launcher started this process, and starting ranks on this machine |
//! | `ranks` | [`Ranks`]: the ranks of a group, and their collectives |
//! | `tree` | the fixed binary tree in which contributions are summed |
//! | `context`, `shards` | attention over one sequence whose rows are divided over ranks |
//! | `number` | numbers as bytes |
//! | `traffic` | bytes sent, and time spent waiting |

mod context;
mod error;
mod in_process;
pub mod launch;
mod mpi;
mod number;
mod ranks;
mod shards;
mod traffic;
mod transport;
pub mod tree;

pub use context::{ContextAttention, Way};
pub use error::{Error, Result};
pub use in_process::{InProcess, run_in_process};
pub use mpi::{Mpi, MpiOptions};
pub use number::Number;
pub use ranks::{Pending, Ranks};
pub use shards::Shards;
pub use traffic::{Traffic, TrafficCount};
pub use transport::{PendingMessage, Transport};
