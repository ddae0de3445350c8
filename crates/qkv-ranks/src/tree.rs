//! The fixed binary tree in which a step's contributions are summed. Its shape depends only on the number of leaves,
//! and the sum of a node is that of its left child plus that of its right child, so it does not matter which rank adds
//! what, and the bits of the root do not depend on the number of ranks.
//!
//! A node over `len > 1` leaves has the largest power of two below `len` of them in its left child: for a power of two
//! the tree is balanced, and otherwise its left part is. A rank holds consecutive leaves ([`share`]) and adds what it
//! can ([`Subtrees`]): what is left are the roots of its complete subtrees, which are few.

use std::ops::Range;

/// The leaves of one of `ranks` ranks: consecutive, and as many as on any other rank, give or take one.
///
/// ```
/// use qkv_ranks::tree::share;
/// assert_eq!([0, 1, 2].map(|rank| share(8, 3, rank)), [0..2, 2..5, 5..8]);
/// ```
pub fn share(leaves: usize, ranks: usize, rank: usize) -> Range<usize> {
    leaves * rank / ranks..leaves * (rank + 1) / ranks
}

/// The first leaf of a node's right child.
fn split(node: &Range<usize>) -> usize {
    let len = node.len();
    node.start + if len.is_power_of_two() { len / 2 } else { len.next_power_of_two() / 2 }
}

/// Whether two adjacent ranges are the children of one node of the tree over `leaves`.
fn are_siblings(leaves: usize, left: &Range<usize>, right: &Range<usize>) -> bool {
    let parent = left.start..right.end;
    let mut node = 0..leaves;
    while node != parent {
        if node.len() < 2 {
            return false;
        }
        let middle = split(&node);
        node = if parent.end <= middle {
            node.start..middle
        } else if parent.start >= middle {
            middle..node.end
        } else {
            return false;
        };
    }
    node.len() > 1 && split(&node) == left.end
}

/// The roots of the complete subtrees within a range of leaves, from left to right.
///
/// ```
/// assert_eq!(qkv_ranks::tree::roots(8, 2..5), [2..4, 4..5]);
/// ```
pub fn roots(leaves: usize, range: Range<usize>) -> Vec<Range<usize>> {
    let mut found = Subtrees::new(leaves);
    range.for_each(|leaf| found.push(leaf..leaf + 1, (), |(), ()| ()));
    found.nodes.into_iter().map(|(node, ())| node).collect()
}

/// Sums of nodes, from left to right; siblings are added as soon as both are present.
///
/// ```
/// use qkv_ranks::tree::Subtrees;
/// let mut sums = Subtrees::new(3);
/// for (leaf, text) in ["a", "b", "c"].into_iter().enumerate() {
///     sums.push(leaf..leaf + 1, text.to_owned(), |left, right| format!("({left} + {right})"));
/// }
/// assert_eq!(sums.into_root().as_deref(), Some("((a + b) + c)"));
/// ```
#[derive(Debug)]
pub struct Subtrees<T> {
    leaves: usize,
    nodes: Vec<(Range<usize>, T)>,
}

impl<T> Subtrees<T> {
    /// An empty list of sums in the tree over `leaves` leaves.
    pub fn new(leaves: usize) -> Self {
        Subtrees { leaves, nodes: Vec::new() }
    }

    /// Adds the next node to the right.
    pub fn push(&mut self, node: Range<usize>, value: T, mut add: impl FnMut(T, T) -> T) {
        let (mut node, mut value) = (node, value);
        while self.nodes.last().is_some_and(|(left, _)| are_siblings(self.leaves, left, &node)) {
            let (left, sum) = self.nodes.pop().expect("just seen");
            (node, value) = (left.start..node.end, add(sum, value));
        }
        self.nodes.push((node, value));
    }

    /// The sums so far: roots of complete subtrees, from left to right.
    pub fn nodes(&self) -> &[(Range<usize>, T)] {
        &self.nodes
    }

    /// Takes the sums so far.
    pub fn take(&mut self) -> Vec<(Range<usize>, T)> {
        std::mem::take(&mut self.nodes)
    }

    /// How many of the last nodes a leaf pushed now would be merged with.
    pub fn merges(&self, leaf: usize) -> usize {
        let mut node = leaf..leaf + 1;
        let found = self.nodes.iter().rev().take_while(|(left, _)| {
            let siblings = are_siblings(self.leaves, left, &node);
            node.start = if siblings { left.start } else { node.start };
            siblings
        });
        found.count()
    }

    /// The sum of all leaves, once all have been pushed.
    pub fn into_root(mut self) -> Option<T> {
        let whole = self.nodes.len() == 1 && self.nodes[0].0 == (0..self.leaves);
        whole.then(|| self.nodes.pop().expect("one").1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tree by its definition.
    fn defined(node: Range<usize>) -> String {
        if node.len() == 1 {
            return node.start.to_string();
        }
        let middle = split(&node);
        format!("({}+{})", defined(node.start..middle), defined(middle..node.end))
    }

    #[test]
    fn any_number_of_ranks_adds_in_the_order_of_the_tree() {
        let add = |left: String, right: String| format!("({left}+{right})");
        for leaves in 1..40 {
            for ranks in 1..=leaves {
                let mut whole = Subtrees::new(leaves);
                let mut next = 0;
                for rank in 0..ranks {
                    let mut own = Subtrees::new(leaves);
                    let range = share(leaves, ranks, rank);
                    assert_eq!(range.start, next);
                    next = range.end;
                    for leaf in range.clone() {
                        let merges = own.merges(leaf);
                        let before = own.nodes().len();
                        own.push(leaf..leaf + 1, leaf.to_string(), add);
                        assert_eq!(own.nodes().len(), before + 1 - merges);
                    }
                    assert_eq!(
                        own.nodes().iter().map(|(node, _)| node.clone()).collect::<Vec<_>>(),
                        roots(leaves, range)
                    );
                    own.take().into_iter().for_each(|(node, sum)| whole.push(node, sum, add));
                }
                assert_eq!(next, leaves);
                assert_eq!(whole.into_root(), Some(defined(0..leaves)), "{leaves} leaves on {ranks} ranks");
            }
        }
    }

    #[test]
    fn a_rank_with_a_power_of_two_of_them_has_one_root() {
        for ranks in [1, 2, 4, 8] {
            assert!((0..ranks).all(|rank| roots(4 * ranks, share(4 * ranks, ranks, rank)).len() == 1));
        }
    }
}
