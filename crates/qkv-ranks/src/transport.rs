//! [`Transport`]: messages of bytes between ranks. Everything above it is the same over MPI and between threads.

use crate::error::Result;

/// Moves messages between the ranks of a job. Messages between two ranks with the same tag arrive in the order in which
/// they were sent. Only [`PendingMessage::wait`] blocks.
pub trait Transport: Send + Sync {
    /// This rank.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn size(&self) -> usize;

    /// Starts to send a message.
    ///
    /// # Errors
    /// If the transport reports an error.
    fn send(&self, to: usize, tag: u32, bytes: Vec<u8>) -> Result<Box<dyn PendingMessage>>;

    /// Starts to receive a message of `len` bytes.
    ///
    /// # Errors
    /// If the transport reports an error.
    fn receive(&self, from: usize, tag: u32, len: usize) -> Result<Box<dyn PendingMessage>>;
}

/// A message in flight. Dropping it before it is done is allowed: its memory stays with the transport.
pub trait PendingMessage: Send {
    /// Whether it is done. Never blocks.
    ///
    /// # Errors
    /// If the other rank is gone.
    fn is_done(&mut self) -> Result<bool>;

    /// Waits until it is done: the bytes that were sent or received.
    ///
    /// # Errors
    /// If the other rank is gone.
    fn wait(self: Box<Self>) -> Result<Vec<u8>>;
}
