//! UAR pages: the parts of BAR0 where software rings doorbells.

/// An allocated page.
pub struct Uar;
