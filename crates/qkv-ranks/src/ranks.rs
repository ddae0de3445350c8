//! [`Ranks`]: a group of ranks and its collectives. They are written once for any transport, with point-to-point
//! messages, so that this crate controls all orders; all ranks of a group must call the same collectives in the same
//! order.

use crate::error::{Error, Result};
use crate::traffic::{Traffic, TrafficCount};
use crate::transport::{PendingMessage, Transport};
use std::sync::Arc;
use std::time::Instant;

/// Tags of collectives. Callers' point-to-point messages have tags from [`Ranks::FREE_TAGS`] on.
const LENGTHS: u32 = 1;
const BODIES: u32 = 2;
const BROADCAST: u32 = 3;
/// Keys and values, and the sums of their gradients, around a ring.
pub(crate) const RING_KEYS: u32 = 4;
pub(crate) const RING_SUMS: u32 = 5;

/// A group of ranks, seen from one of them.
///
/// ```
/// let alone = qkv_ranks::Ranks::alone();
/// assert_eq!((alone.rank(), alone.size()), (0, 1));
/// assert_eq!(alone.all_gather(b"x")?, [b"x"]);
/// # Ok::<(), qkv_ranks::Error>(())
/// ```
#[derive(Clone)]
pub struct Ranks {
    transport: Arc<dyn Transport>,
    /// The ranks of the job that belong to the group.
    members: Arc<[usize]>,
    /// This rank's place among them.
    rank: usize,
    traffic: Arc<Traffic>,
}

impl std::fmt::Debug for Ranks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.size())
    }
}

impl Ranks {
    /// Tags from this one on are free for [`send`](Ranks::send) and [`receive`](Ranks::receive).
    pub const FREE_TAGS: u32 = 16;

    /// All ranks of a transport.
    pub fn new(transport: Arc<dyn Transport>) -> Ranks {
        let members = (0..transport.size()).collect();
        let rank = transport.rank();
        Ranks { transport, members, rank, traffic: Arc::default() }
    }

    /// A single rank: a process that was not launched as a rank.
    pub fn alone() -> Ranks {
        Ranks::new(Arc::new(crate::in_process::InProcess::all(1).pop().expect("one")))
    }

    /// This rank's number in the group.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks in the group.
    pub fn size(&self) -> usize {
        self.members.len()
    }

    /// Whether this is the first rank: the one that logs and writes files.
    pub fn is_first(&self) -> bool {
        self.rank == 0
    }

    /// The group of some of these ranks, in the order given; this rank must be one of them. Groups that work at the
    /// same time may have at most one rank in common.
    ///
    /// # Errors
    /// If this rank is not among them, or one of them does not exist.
    pub fn group(&self, ranks: &[usize]) -> Result<Ranks> {
        let members: Option<Arc<[usize]>> = ranks.iter().map(|&rank| self.members.get(rank).copied()).collect();
        let found = ranks.iter().position(|&rank| rank == self.rank);
        match (members, found) {
            (Some(members), Some(rank)) => Ok(Ranks { members, rank, ..self.clone() }),
            _ => Err(Error::Invalid(format!("rank {} of {} is not in the group {ranks:?}", self.rank, self.size()))),
        }
    }

    /// Bytes sent and time waited so far, by this rank in all its groups.
    pub fn traffic(&self) -> TrafficCount {
        self.traffic.count()
    }

    /// Starts to send a message to another rank of the group.
    ///
    /// # Errors
    /// If the transport reports an error.
    pub fn send(&self, to: usize, tag: u32, bytes: Vec<u8>) -> Result<Pending> {
        self.traffic.sent(bytes.len());
        self.pending(self.transport.send(self.members[to], tag, bytes)?)
    }

    /// Starts to receive a message of `len` bytes from another rank of the group.
    ///
    /// # Errors
    /// If the transport reports an error.
    pub fn receive(&self, from: usize, tag: u32, len: usize) -> Result<Pending> {
        self.pending(self.transport.receive(self.members[from], tag, len)?)
    }

    fn pending(&self, message: Box<dyn PendingMessage>) -> Result<Pending> {
        Ok(Pending { message, traffic: self.traffic.clone() })
    }

    /// Each rank passes one message for every rank, itself included, and receives those addressed to it, in the order
    /// of the ranks. `lens` are the lengths of the messages it receives.
    ///
    /// # Errors
    /// If a rank is gone, or a message has a different length.
    pub fn all_to_all(&self, mut messages: Vec<Vec<u8>>, lens: &[usize]) -> Result<Vec<Vec<u8>>> {
        self.exchange(BODIES, &mut messages, lens)
    }

    fn exchange(&self, tag: u32, messages: &mut [Vec<u8>], lens: &[usize]) -> Result<Vec<Vec<u8>>> {
        assert_eq!((messages.len(), lens.len()), (self.size(), self.size()), "a message for every rank");
        let others = || (1..self.size()).map(|by| (self.rank + by) % self.size());
        let receive = |from: usize| Ok((from, self.receive(from, tag, lens[from])?));
        let coming = others().filter(|&from| lens[from] > 0).map(receive).collect::<Result<Vec<_>>>()?;
        let mut going = Vec::new();
        for to in others() {
            let message = std::mem::take(&mut messages[to]);
            if !message.is_empty() {
                going.push(self.send(to, tag, message)?);
            }
        }
        let mut found: Vec<Vec<u8>> = vec![Vec::new(); self.size()];
        found[self.rank] = std::mem::take(&mut messages[self.rank]);
        for (from, message) in coming {
            found[from] = message.wait()?;
        }
        going.into_iter().try_for_each(|message| message.wait().map(drop))?;
        Ok(found)
    }

    /// The bytes of every rank, in the order of the ranks.
    ///
    /// # Errors
    /// If a rank is gone.
    pub fn all_gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let len = (own.len() as u64).to_le_bytes().to_vec();
        let lens = self.exchange(LENGTHS, &mut vec![len; self.size()], &vec![8; self.size()])?;
        let lens: Vec<usize> = lens.iter().map(|len| length(len)).collect();
        self.all_gather_sized(own, &lens)
    }

    /// [`all_gather`](Ranks::all_gather) with known lengths.
    ///
    /// # Errors
    /// If a rank is gone, or a message has a different length.
    pub fn all_gather_sized(&self, own: &[u8], lens: &[usize]) -> Result<Vec<Vec<u8>>> {
        self.exchange(BODIES, &mut vec![own.to_vec(); self.size()], lens)
    }

    /// Sends the bytes of rank `root` to all ranks. The others may pass anything.
    ///
    /// # Errors
    /// If a rank is gone.
    pub fn broadcast(&self, root: usize, bytes: Vec<u8>) -> Result<Vec<u8>> {
        // A binomial tree: in round r, the 2^r ranks that have the bytes send them to 2^r others.
        let size = self.size();
        let place = (self.rank + size - root) % size;
        let (mut bytes, mut have) = (bytes, 1);
        let mut going = Vec::new();
        while have < size {
            if (have..2 * have).contains(&place) {
                let from = (place - have + root) % size;
                let len = length(&self.receive(from, LENGTHS, 8)?.wait()?);
                bytes = self.receive(from, BROADCAST, len)?.wait()?;
            } else if place < have && place + have < size {
                let to = (place + have + root) % size;
                going.push(self.send(to, LENGTHS, (bytes.len() as u64).to_le_bytes().to_vec())?);
                going.push(self.send(to, BROADCAST, bytes.clone())?);
            }
            have *= 2;
        }
        going.into_iter().try_for_each(|message| message.wait().map(drop))?;
        Ok(bytes)
    }

    /// Waits until every rank has called this.
    ///
    /// # Errors
    /// If a rank is gone.
    pub fn barrier(&self) -> Result<()> {
        self.all_gather(&[]).map(drop)
    }

    /// Checks that all ranks have the same value of something, which has to fit on a line.
    ///
    /// # Errors
    /// Names what differs, and two ranks that differ in it.
    pub fn agree(&self, what: &str, own: &str) -> Result<()> {
        let all = self.all_gather(own.as_bytes())?;
        let Some(other) = all.iter().position(|found| *found != all[0]) else { return Ok(()) };
        let text = |rank: usize| String::from_utf8_lossy(&all[rank]).into_owned();
        Err(Error::Disagreement { what: what.to_owned(), ranks: [0, other], first: text(0), second: text(other) })
    }
}

fn length(bytes: &[u8]) -> usize {
    usize::try_from(u64::from_le_bytes(bytes.try_into().expect("eight bytes"))).expect("a length in memory")
}

/// A message in flight.
pub struct Pending {
    message: Box<dyn PendingMessage>,
    traffic: Arc<Traffic>,
}

impl Pending {
    /// Whether it is done. Never blocks.
    ///
    /// # Errors
    /// If the other rank is gone.
    pub fn is_done(&mut self) -> Result<bool> {
        self.message.is_done()
    }

    /// Waits until it is done: the bytes that were sent or received.
    ///
    /// # Errors
    /// If the other rank is gone.
    pub fn wait(self) -> Result<Vec<u8>> {
        let start = Instant::now();
        let found = self.message.wait();
        self.traffic.waited(start);
        found
    }
}
