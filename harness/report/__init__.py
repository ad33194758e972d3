"""Tables, figures and pages for reports of any content."""
