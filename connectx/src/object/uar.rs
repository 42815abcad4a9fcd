//! UAR pages: the parts of BAR0 where software rings doorbells.

/// An allocated UAR page.
pub struct Uar;
